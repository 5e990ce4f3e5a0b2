"""Torch engines for `flow_live`, each a process, whose steps take the time of `paced_engine`."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from tandem_contract import endpoints
from tandem_contract import metrics as names
from tandem_engine.tiny import make_tiny_model
from tandem_local.ports import free_port

from . import paced_engine
from .flow_engines import BUDGET, KV_TOKENS, REQUESTS
from .peers import healthy

_HOST: Final = "127.0.0.1"
_BLOCK: Final = 16
_READ_SECONDS: Final = 0.25
"""Seconds between two looks at the engines' own queues."""
_STARTS_WITHIN: Final = 120.0
_COUNTED: Final = (names.ENGINE_PROMPT_TOKENS, names.ENGINE_GENERATION_TOKENS)


@dataclass
class _Since:
    """What an engine did since it was last asked."""

    at: float
    tokens: float
    """That it had computed then, of all time."""
    queues: list[float] = field(default_factory=list)


class TorchEngines:
    """Engines that run."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = ports
        self._since: dict[int, _Since] = {}

    async def read(self, http: aiohttp.ClientSession) -> list[dict[str, float]]:
        """Of each engine, since the last call: `tokens`, `seconds`, and `queued`, requests in its
        own queue × seconds."""
        return [await self._read(http, port) for port in self.ports]

    async def watch(self) -> None:
        """Look at the queues until cancelled."""
        async with aiohttp.ClientSession() as http:
            while True:
                for port in self.ports:
                    page = await _page(http, port)
                    if (since := self._since.get(port)) is not None:
                        since.queues.append(page.get(names.ENGINE_WAITING, 0.0))
                await asyncio.sleep(_READ_SECONDS)

    async def _read(self, http: aiohttp.ClientSession, port: int) -> dict[str, float]:
        page, now = await _page(http, port), time.monotonic()
        tokens = sum(page.get(name, 0.0) for name in _COUNTED)
        before = self._since.get(port, _Since(now, tokens))
        self._since[port] = _Since(now, tokens)
        seconds = now - before.at
        queue = sum(before.queues) / len(before.queues) if before.queues else 0.0
        return {"tokens": tokens - before.tokens, "seconds": seconds, "queued": queue * seconds}


async def _page(http: aiohttp.ClientSession, port: int) -> dict[str, float]:
    """The metrics page: name → value, of all labels together."""
    async with http.get(f"http://{_HOST}:{port}{endpoints.METRICS}") as answer:
        lines = (await answer.text()).splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@asynccontextmanager
async def torch_engines(directory: Path, number: int) -> AsyncIterator[TorchEngines]:
    """`number` engines, once they answer; their logs go to `directory`."""
    model = directory / "model"
    make_tiny_model(model, layers=1, hidden=32, heads=2, max_position=8192)
    ports = [free_port(_HOST) for _ in range(number)]
    async with AsyncExitStack() as parts:
        processes = [
            await parts.enter_async_context(_engine(model, port, directory / f"engine-{port}.log"))
            for port in ports
        ]
        urls = [f"http://{_HOST}:{port}" for port in ports]
        async with asyncio.timeout(_STARTS_WITHIN):
            await asyncio.gather(*map(healthy, urls, processes))
        engines = TorchEngines(ports)
        watching = asyncio.create_task(engines.watch())
        try:
            yield engines
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@asynccontextmanager
async def _engine(model: Path, port: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    # -P: this folder has modules that are named as those of the standard library.
    command = [sys.executable, "-P", str(Path(paced_engine.__file__))]
    command += ["--model", str(model), "--served-model-name", "m", "--device", "cpu"]
    command += ["--host", _HOST, "--port", str(port)]
    command += ["--max-num-seqs", str(REQUESTS), "--max-num-batched-tokens", str(BUDGET)]
    command += ["--num-gpu-blocks-override", str(KV_TOKENS // _BLOCK), "--max-model-len", "8192"]
    command += ["--block-size", str(_BLOCK)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=asyncio.subprocess.STDOUT, env=one_thread
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
