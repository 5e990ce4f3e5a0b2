"""Sends POST requests of which each has headers of its own, as signed plans need; h2load cannot."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp

from .h2load import Outcome

_SKIPPED: Final = ("accept", "accept-encoding", "user-agent")
"""Headers that aiohttp would add, and h2load does not."""


async def drive(
    url: str,
    body: bytes,
    requests: Sequence[Mapping[str, str]],
    clients: int,
    rate: float | None = None,
) -> Outcome:
    """Send `body` with the headers of each of `requests`, over HTTP/1.1, and wait for all answers.
    `rate`: as in `h2load.Load`."""
    loop = asyncio.get_running_loop()
    queue, latencies, data = iter(enumerate(requests)), [], 0

    async def client() -> None:
        nonlocal data
        for number, headers in queue:
            if rate is not None:
                # A late client catches up: the rate is that of all requests.
                await asyncio.sleep(started + number / rate - loop.time())
            sent = loop.time()
            async with http.post(url, data=body, headers=headers) as answer:
                size = len(await answer.read())
            if 200 <= answer.status < 300:
                latencies.append((loop.time() - sent) * 1000)
                data += size

    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, skip_auto_headers=_SKIPPED) as http:
        started = loop.time()
        await asyncio.gather(*[client() for _ in range(clients)])
        seconds = loop.time() - started
    return Outcome(len(latencies), data, len(requests) / seconds, tuple(sorted(latencies)))
