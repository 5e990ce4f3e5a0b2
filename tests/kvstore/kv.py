"""Chunks with known bytes, and a store client for them."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_kvstore.chunk_store import Chunk, ChunkStore, chunks_of
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt, chunk_keys
from tandem_kvstore.format.tensors import LayerGroup, TensorSpec
from tandem_kvstore.guard.breaker import BreakerSettings, BreakerState
from tandem_kvstore.guard.load_guard import RETRY, LoadGuard
from tandem_kvstore.location import StoreLocation
from tandem_kvstore.stores import ObjectStore, open_store

CHUNK_TOKENS = 32
IDENTITY = KvIdentity(
    weights="c0ffee", dtype="float32", layers=4, kv_heads=2, head_dim=8, block_size=16,
    chunk_tokens=CHUNK_TOKENS, layout="block,kv,token,head,dim",
)  # fmt: skip
SHAPE = (2, 2, 16, 2, 8)


def group_specs() -> list[tuple[str, tuple[TensorSpec, ...]]]:
    """Two groups of two layers."""
    return [
        (f"{g:02}", tuple(TensorSpec(f"layer.{2 * g + i}", "float32", SHAPE) for i in range(2)))
        for g in range(2)
    ]


def prompt(seed: int, chunks: int) -> Prompt:
    """A prompt of full chunks and one more token."""
    source = random.Random(seed)
    return Prompt([source.randrange(500) for _ in range(chunks * CHUNK_TOKENS + 1)])


def chain(seed: int, chunks: int, identity: KvIdentity = IDENTITY) -> list[Chunk]:
    """The chunks of a prompt."""
    return chunks_of(chunk_keys(identity, prompt(seed, chunks)), identity.chunk_tokens)


def layer_groups(chunk: Chunk, writer: int = 0) -> list[LayerGroup]:
    """The KV that `writer` computed for a chunk: bytes that depend on both."""
    return [
        LayerGroup(name, specs, tuple(tensor_bytes(chunk, spec, writer) for spec in specs))
        for name, specs in group_specs()
    ]


async def cancel_when(blocked: asyncio.Event, load: Coroutine[Any, Any, object]) -> None:
    """Run `load`, and cancel it when one of its tasks has set `blocked`."""
    task = asyncio.create_task(load)
    await blocked.wait()
    # The tasks behind the blocked one have run by the next turn of the loop.
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def tensor_bytes(chunk: Chunk, spec: TensorSpec, writer: int = 0) -> bytes:
    """The bytes of one tensor."""
    return random.Random(f"{chunk.key}{spec.name}{writer}").randbytes(spec.size)


@dataclass
class Engine:
    """A store's client, and what it delivered."""

    objects: ObjectStore
    chunks: ChunkStore
    delivered: dict[tuple[int, str], list[bytes]] = field(default_factory=dict)

    async def deliver(self, index: int, group: str, tensors: list[memoryview]) -> None:
        self.delivered[index, group] = [bytes(tensor) for tensor in tensors]

    async def put_all(self, chunks: Sequence[Chunk], writer: int = 0) -> None:
        for chunk in chunks:
            await self.chunks.put(chunk, layer_groups(chunk, writer))

    def assert_delivered(self, chunks: Sequence[Chunk], writers: Sequence[int] = (0,)) -> None:
        """Each chunk was delivered with the bytes of one writer."""
        for i, chunk in enumerate(chunks):
            got = [self.delivered[i, name] for name, _ in group_specs()]
            assert any(
                got == [list(group.parts) for group in layer_groups(chunk, writer)]
                for writer in writers
            ), f"chunk {i} has bytes that no writer stored"


def engine(location: StoreLocation, identity: KvIdentity = IDENTITY, max_inline: int = 0) -> Engine:
    """A client of the store at `location`, which writes data objects, as those of large models."""
    objects = open_store(location)
    return Engine(objects, ChunkStore(objects, location, identity, max_inline=max_inline))


@dataclass
class Counts:
    """An observer that counts."""

    loaded: int = 0
    not_loaded: dict[Reason, int] = field(default_factory=dict)
    stored: int = 0
    not_stored: dict[Reason, int] = field(default_factory=dict)
    breaker: BreakerState = BreakerState.CLOSED
    failures: list[str] = field(default_factory=list)

    def record_load(self, chunks: int, size: int, seconds: float) -> None:
        self.loaded += chunks

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self.not_loaded[reason] = self.not_loaded.get(reason, 0) + chunks

    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None:
        self.stored += 1

    def record_breaker(self, state: BreakerState) -> None:
        self.breaker = state

    def record_failure(self, message: str) -> None:
        self.failures.append(message)

    def record_not_stored(self, reason: Reason) -> None:
        self.not_stored[reason] = self.not_stored.get(reason, 0) + 1


def client(
    location: StoreLocation,
    *,
    compute: float = 0.1,
    breaker: BreakerSettings | None = None,
    retry: float = RETRY,
) -> tuple[StoreClient, Engine, Counts]:
    """A guarded client of an engine that computes a token in `compute` seconds."""
    behind, counts = engine(location), Counts()
    chunk_bytes = sum(spec.size for _, specs in group_specs() for spec in specs)
    guarded = StoreClient(
        behind.chunks,
        behind.objects,
        counts,
        chunk_tokens=CHUNK_TOKENS,
        chunk_bytes=chunk_bytes,
        guard=LoadGuard(breaker, retry),
    )
    guarded.guard.observe_compute(1000, 0, 1000 * compute)
    return guarded, behind, counts
