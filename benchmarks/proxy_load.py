"""What `benchmarks.sidecar` and `benchmarks.router` share: their requests, and how they end.

Both send the same chat to proxies in front of `benchmarks.fake_engine`.
"""

import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Final, TypeVar

import aiohttp
import click

from tandem_local.errors import SetupError
from tandem_local.router import find_envoy

from . import fake_engine, h2load, programs

CHUNKS: Final = 256
"""Events of a streamed answer."""
_T = TypeVar("_T")
_WORDS: Final = "the quick brown fox jumps over a lazy dog "


def chat(size: int, *, stream: bool) -> bytes:
    """The body of a chat whose prompt has `size` bytes."""
    text = (_WORDS * (size // len(_WORDS) + 1))[:size]
    request = {"model": "bench", "max_tokens": 64, "stream": stream}
    request["messages"] = [{"role": "user", "content": text}]
    return json.dumps(request, separators=(",", ":")).encode()


def answer_size(*, stream: bool) -> int:
    """Bytes of the engine's answer."""
    return fake_engine.stream_size(CHUNKS) if stream else len(fake_engine.PLAIN)


async def engine_counts(port: int) -> dict[str, int]:
    """What the fake engine on `port` of 127.0.0.1 counted: `prefills` and `pulls`."""
    url = f"http://127.0.0.1:{port}/counts"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        counts: dict[str, int] = await response.json()
        return counts


def missing_programs() -> list[str]:
    """Programs that both start and this machine lacks, with how to install them."""
    return programs.missing([h2load.find, find_envoy])


def measured(benchmark: str, measure: Coroutine[object, object, _T]) -> _T:
    """The result of `measure`; exits with status 2 and a message if a program is missing."""
    try:
        return asyncio.run(measure)
    except (h2load.NotInstalled, SetupError) as err:
        measure.close()
        click.echo(f"benchmarks.{benchmark}: {err}", err=True)
        sys.exit(2)
