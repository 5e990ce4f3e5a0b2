"""Runs h2load (nghttp2) and parses its output; sends what h2load cannot (`drive_distinct`).

Errors: `NotInstalled`: h2load is missing; `Unreadable`: its output has an unexpected format.
"""

import asyncio
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

_HOW: Final = (
    "h2load is not installed: apt-get install nghttp2-client (Debian, Ubuntu), "
    "dnf install nghttp2 (Fedora), brew install nghttp2 (macOS)"
)
_FINISHED: Final = re.compile(r"finished in .*?, ([\d.]+) req/s")
_STATUS: Final = re.compile(r"status codes: (\d+) 2xx")
_DATA: Final = re.compile(r"\((\d+)\) data")
_SKIPPED: Final = ("accept", "accept-encoding", "user-agent")
"""Headers that aiohttp would add, and h2load does not."""


class NotInstalled(RuntimeError):
    """The message says how to install it."""


class Unreadable(RuntimeError):
    """The message is the output of h2load."""


@dataclass(frozen=True, slots=True)
class Load:
    """A number of POST requests with the same body, over HTTP/1.1."""

    body: Path
    headers: tuple[str, ...]
    """Header lines, `name: value` each."""
    requests: int
    clients: int = 8
    rate: float | None = None
    """Requests per second of all clients together; None: the next request follows each answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers."""

    good: int
    """Complete answers with status 2xx."""
    data: int
    """Bytes of all bodies, without the chunked coding."""
    per_second: float
    latencies: tuple[float, ...]
    """Milliseconds from each request to the end of its answer, ascending."""

    def quantile(self, share: float) -> float:
        """The time in milliseconds within which a `share` (0 to 1) of the answers was complete."""
        return self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]


def find() -> str:
    """The path of h2load. Raises NotInstalled."""
    if (program := shutil.which("h2load")) is None:
        raise NotInstalled(_HOW)
    return program


async def drive(url: str, load: Load, scratch: Path) -> Outcome:
    """Send `load` to `url` and wait for all answers. Raises NotInstalled, Unreadable."""
    log = scratch / "latencies"
    # h2load appends to the file: latencies of the load before would be counted.
    log.unlink(missing_ok=True)
    command = [find(), "--h1", "-c", str(load.clients), "-n", str(load.requests)]
    command += ["-d", str(load.body), "--log-file", str(log), "-N", "10"]
    command += [part for header in load.headers for part in ("-H", header)]
    if load.rate is not None:
        # h2load takes the rate of each client.
        command += ["--rps", f"{load.rate / load.clients:g}"]
    process = await asyncio.create_subprocess_exec(*command, url, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return _read(output.decode(), log)


def _read(printed: str, log: Path) -> Outcome:
    finished, status, data = (p.search(printed) for p in (_FINISHED, _STATUS, _DATA))
    if not (finished and status and data):
        raise Unreadable(printed)
    rows = (line.split("\t") for line in log.read_text().splitlines())
    # Columns: start time, HTTP status, time to the end of the answer in microseconds.
    latencies = sorted(int(row[2]) / 1000 for row in rows if row[1] == "200")
    return Outcome(int(status[1]), int(data[1]), float(finished[1]), tuple(latencies))


async def drive_distinct(
    url: str,
    body: bytes,
    requests: Sequence[Mapping[str, str]],
    clients: int,
    rate: float | None = None,
) -> Outcome:
    """Send `body` with the headers of each of `requests` over HTTP/1.1, and wait for all answers.
    Signed plans need that; h2load cannot. `rate`: as in `Load`."""
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
