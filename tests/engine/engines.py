"""Engines on a tiny model, and helpers for their tests."""

import asyncio
import functools
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from tandem_engine.blocks import BlockEvent
from tandem_engine.config import EngineConfig, KvRole, KvTransferConfig
from tandem_engine.engine import Engine, Generation
from tandem_engine.observer import EngineObserver
from tandem_engine.tiny import make_tiny_model
from tandem_engine.types import Delta, LoadFailurePolicy, PullResult, SamplingParams, Tier
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState

from .dense import DenseLlama
from .device import DEVICE

torch.set_num_threads(1)

GREEDY = functools.partial(SamplingParams, temperature=0.0, ignore_eos=True)


@functools.cache
def _directory() -> "tempfile.TemporaryDirectory[str]":
    # Not made at import: workers are forks, and each writes a model of its own.
    return tempfile.TemporaryDirectory(prefix="tandem-tiny-")


@functools.cache
def tiny_model() -> Path:
    """One tiny model for all tests of this process."""
    directory = Path(_directory().name)
    make_tiny_model(directory, layers=2, hidden=64, heads=4, kv_heads=2)
    return directory


@functools.cache
def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy answer of the dense reference implementation."""
    return _dense().greedy(prompt, count)


@functools.cache
def _dense() -> DenseLlama:
    return DenseLlama(tiny_model())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids, the same for the same seed."""
    source = random.Random(seed)
    return tuple(source.randrange(4, 512) for _ in range(length))


class Tally:
    """An EngineObserver that counts calls and keeps the block events."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.events: list[BlockEvent] = []

    def record_prefix_lookup(self, queries: int, hits: int) -> None:
        self.counts.update(queries=queries, hits=hits)

    def record_external_lookup(self, queries: int, hits: int) -> None:
        self.counts.update(external_queries=queries, external_hits=hits)

    def record_prompt(self, computed: int, cached: int, external: int) -> None:
        self.counts.update(computed=computed, cached=cached, external=external)

    def record_generated_tokens(self, tokens: int) -> None:
        self.counts.update(generated=tokens)

    def record_preemption(self) -> None:
        self.counts.update(preempted=1)

    def record_pull(self, pulled: PullResult) -> None:
        self.counts.update(pulls=1, pulled_bytes=pulled.bytes)

    def record_pull_failure(self) -> None:
        self.counts.update(pull_failures=1)

    def record_kv_expiry(self) -> None:
        self.counts.update(expired=1)

    def record_tier_load(self, tier: Tier, tokens: int) -> None:
        self.counts[f"{tier}_loaded"] += tokens

    def record_tier_store(self, tier: Tier, tokens: int) -> None:
        self.counts[f"{tier}_stored"] += tokens

    def record_host_tier(self, size: int) -> None:
        self.counts["host_bytes"] = size

    def record_breaker(self, state: BreakerState) -> None:
        self.counts["breaker"] = state

    def record_failure(self, message: str) -> None:
        self.failures.append(message)

    def record_load(self, chunks: int, size: int, seconds: float) -> None:
        self.counts.update(loads=1)

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self.counts[f"not_loaded_{reason}"] += chunks

    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None:
        self.counts.update(stored=1, stored_new=is_new)

    def record_not_stored(self, reason: Reason) -> None:
        self.counts[f"not_stored_{reason}"] += 1

    def record_kv_event(self, event: BlockEvent) -> None:
        self.events.append(event)


def transfer(
    role: KvRole,
    engine_id: str,
    *,
    lease: float = 30.0,
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
) -> KvTransferConfig:
    """A hand-off configuration on a free port."""
    return KvTransferConfig(role, engine_id, lease, policy, side_channel_port=0)


@asynccontextmanager
async def running(tally: EngineObserver | None = None, **settings: Any) -> AsyncIterator[Engine]:
    """A started engine; every block must be free again when the test ends."""
    values = {"dtype": "float64", "num_blocks": 64, "device": DEVICE, **settings}
    config = EngineConfig(model=tiny_model(), **values)
    engine = Engine(config, tally or Tally())
    await engine.start()
    try:
        yield engine
        if engine.healthy:
            await until(lambda: all_free(engine))
    finally:
        await engine.stop()
    assert all_free(engine)


def all_free(engine: Engine) -> bool:
    """Whether every block is free and no request is queued."""
    stats = engine.stats()
    return stats.free_blocks == stats.num_blocks and stats.running == stats.waiting == 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; fails after 20 s."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def finish(generation: Generation) -> tuple[list[int], Delta]:
    """All tokens, and the last delta."""
    deltas = [delta async for delta in generation]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]
