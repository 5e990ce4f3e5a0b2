"""Requests to the engines of `benchmarks.gpu`, and the store beside them."""

import asyncio
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from tests.engine.engines import GREEDY, finish

from tandem_engine.engine import Engine
from tandem_engine.types import Request

_SHARED: Final = Path("/dev/shm")
_ids = map(str, itertools.count())


def tokens_of(length: int, seed: object) -> tuple[int, ...]:
    """A prompt."""
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(4, 500) for _ in range(length))


async def forget(engine: Engine) -> None:
    """Empty the prefix cache; blocks are in use until their chunks are copied."""
    while not engine.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.002)


async def ask(
    engine: Engine, tokens: tuple[int, ...], count: int = 1, kv: Any = None
) -> tuple[float, list[int], Any]:
    """Seconds, tokens and transfer parameters of one answer."""
    begin = time.perf_counter()
    request = Request(next(_ids), tokens, GREEDY(max_tokens=count), kv)
    answer, last = await finish(engine.submit(request))
    return time.perf_counter() - begin, answer, last.kv_transfer_params


@contextmanager
def large_directory() -> Iterator[str]:
    """A directory for stored KV: in memory, if there is space."""
    in_memory = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > 20 << 30
    with tempfile.TemporaryDirectory(dir=_SHARED if in_memory else None) as directory:
        yield directory


@asynccontextmanager
async def store_server() -> AsyncIterator[str]:
    """`tandem store`; yields its URL."""
    with large_directory() as directory:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem_cli", "store"),
            *("--listen", "127.0.0.1:0", "--dir", directory),
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        assert process.stdout is not None
        try:
            yield (await process.stdout.readline()).decode().split()[-1]
        finally:
            process.terminate()
            await process.wait()
