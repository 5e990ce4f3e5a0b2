"""Real vLLM on the CPU with and without KV in external storage, for the benchmarks of storage.

Engines run on one model, which is small and random: absolute times mean nothing. Engines with
storage have TandemStorageConnector and an S3 store. Each prompt is sent to all engines, one at a
time, in an order that alternates, so all see the same machine.
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import click
from tests.epp.real import until
from tests.vllm.engines import MODEL_NAME, VENV, Spawned, metric
from tests.vllm.single import SingleVllm, single_vllm
from tests.vllm.storage import packages, transfer_config

from tandem_contract import vllm_storage as names
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_engine.tiny import make_tiny_model
from tandem_kvstore.errors import Reason

from .figures import Figure, at_most, progress
from .storage import KEYS

LOADED: Final = f"{names.LOADED_TOKENS}_total"
_WRITTEN: Final = f"{names.STORED_TOKENS}_total"
_NOT_WRITTEN: Final = f"{names.NOT_STORED_CHUNKS}_total"
_ROLES: Final = {"stored": "kv_both", "saving": "kv_producer", "looking": "kv_consumer"}
"""Kind of an engine with storage → its `kv_role`."""


class MissingVllm(click.ClickException):
    """Real vLLM is not installed."""

    def __init__(self) -> None:
        super().__init__(f"{VENV} is missing: run make vllm-setup")


@dataclass
class Bench:
    """What all engines of a run share."""

    directory: Path
    url: str
    chunk_tokens: int
    http: aiohttp.ClientSession

    def __post_init__(self) -> None:
        self.model = self.directory / "model"
        make_tiny_model(self.model, layers=4, hidden=512, heads=8, kv_heads=4)
        keys = self.directory / "keys"
        keys.mkdir()
        for name, key in zip(("access_key", "secret_key"), KEYS, strict=True):
            (keys / name).write_text(key)

    @asynccontextmanager
    async def engines(self, *kinds: str) -> AsyncIterator[Mapping[str, SingleVllm]]:
        """Engines that start at the same time: `stored` has the connector, `plain` has not,
        `saving` only saves and `looking` only looks up. Each kind has a namespace of its own."""
        env = {"PYTHONPATH": packages(self.directory), "VLLM_SERVER_DEV_MODE": "1"}
        async with AsyncExitStack() as stack:
            running = {}
            for kind in kinds:
                place = Path(tempfile.mkdtemp(prefix=kind, dir=self.directory))
                starting = single_vllm(self.model, place, *self._flags(kind), env=env)
                running[kind] = stack.enter_context(starting)
            for engine in running.values():
                await engine.ready()
            for length in (300, 600, 1200, 2400):
                for engine in running.values():
                    await self.ttft(engine, prompt(length))
            yield running

    def _flags(self, kind: str) -> tuple[str, ...]:
        if kind not in _ROLES:
            return ()
        config = transfer_config(
            self.url, _ROLES[kind], kv_namespace=f"bucket/{kind}",
            credentials_dir=str(self.directory / "keys"), chunk_tokens=self.chunk_tokens,
        )  # fmt: skip
        return "--kv-transfer-config", config

    @contextmanager
    def alone(self, running: Mapping[str, SingleVllm], kind: str) -> Iterator[None]:
        """Stop the processes of all engines but `kind`; afterwards they go on."""
        others = [engine for name, engine in running.items() if name != kind]
        for engine in others:
            engine.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for engine in others:
                engine.signal(signal.SIGCONT)

    @contextmanager
    def busy(self, processes: int) -> Iterator[None]:
        """Run processes that want a core all the time."""
        command = (sys.executable, "-c", "while True: pass")
        log = self.directory / "busy.log"
        spawned = [Spawned(command, {}, log) for _ in range(processes)]
        try:
            yield
        finally:
            for process in spawned:
                process.end()

    async def ttft(self, engine: SingleVllm, tokens: Sequence[int]) -> float:
        """Seconds to the only token of the answer."""
        body = {"model": MODEL_NAME, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        url = engine.url + PATHS[RequestKind.COMPLETIONS]
        began = time.perf_counter()
        async with self.http.post(url, json=body) as response:
            await response.read()
            response.raise_for_status()
        return time.perf_counter() - began

    async def forget(self, engine: SingleVllm) -> None:
        """Empty the engine's own prefix cache."""
        async with self.http.post(f"{engine.url}/reset_prefix_cache") as response:
            response.raise_for_status()

    async def value(self, engine: SingleVllm, name: str, **labels: str) -> float:
        """A metric of the engine."""
        return metric(await engine.metrics(self.http), name, **labels)

    async def written(self, engine: SingleVllm) -> float:
        """Chunks whose write has ended, well or not."""
        page = await engine.metrics(self.http)
        return metric(page, _WRITTEN) / self.chunk_tokens + metric(page, _NOT_WRITTEN)

    async def store(self, engine: SingleVllm, tokens: Sequence[int]) -> None:
        """Compute a prompt, and wait until it is stored."""
        before = await self.written(engine)
        await self.ttft(engine, tokens)
        end = before + len(tokens) // self.chunk_tokens

        async def is_written() -> bool:
            return await self.written(engine) >= end

        await until(is_written, 60)


_numbers: Final = iter(range(10**9))


def prompt(length: int, seed: object = None) -> list[int]:
    """Random tokens; new ones without a seed."""
    source = random.Random(f"{length} {next(_numbers) if seed is None else seed}")
    return source.choices(range(4, 190), k=length)


def alternated(running: Mapping[str, SingleVllm], number: int) -> list[str]:
    """The engines in the order of round `number`."""
    return list(running) if number % 2 else list(reversed(running))


def tails(name: str, times: Mapping[str, Sequence[float]]) -> list[Figure]:
    """The 50th and the 99th percentile with storage, over those without."""
    figures = []
    for percent in (50, 99):
        at = {
            kind: sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
            for kind, values in times.items()
        }
        ratio = at["stored"] / at["plain"]
        figures.append(at_most(f"{name}: p{percent} TTFT vs without storage", ratio, "x", 1.1))
    return figures


async def show_reasons(bench: Bench, engine: SingleVllm) -> None:
    """Say why chunks were not loaded or not stored."""
    for name in (names.NOT_LOADED_CHUNKS, names.NOT_STORED_CHUNKS):
        counts = {r: await bench.value(engine, f"{name}_total", reason=r) for r in Reason}
        shown = ", ".join(f"{r} {count:.0f}" for r, count in counts.items() if count)
        progress(f"storage_vllm: {name}: {shown or 'none'}")
