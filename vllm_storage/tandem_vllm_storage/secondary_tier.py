"""Storage as a secondary tier of vLLM's own OffloadingConnector, behind its host memory.

    {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [
       {"type": "TandemSecondaryTier", "module_path": "tandem_vllm_storage.secondary_tier",
        "endpoint": "http://store:8080", "weights": "COMMIT"}]}

Objects, checksums and circuit breaker are the connector's; the namespace is another one, because
the keys are vLLM's block hashes, and a chunk has the bytes of all workers in the layout of vLLM's
host memory. Not run on a GPU. The constructor raises StorageConfigError.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from dataclasses import fields
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Final

from vllm import __version__
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.client import StoreClient
from tandem_kvstore.format.identity import KvIdentity
from tandem_kvstore.format.tensors import LayerGroup, TensorSpec
from tandem_kvstore.observer import NullObserver
from tandem_kvstore.open_client import open_client

from .settings import StorageConfigError, StorageSettings, parse_settings
from .store_thread import StoreThread

NAMESPACE: Final = "inference/kv-offload"
"""Default of kv_namespace. Not the connector's, whose chunks have other bytes."""
_LOOK_UP_SECONDS: Final = 0.25
"""Seconds after which a look-up is a miss. Longer: requests wait for a slow store."""
_LOAD_SECONDS: Final = 5.0
"""Seconds for the load of a chunk. When it fails, vLLM computes the request."""
_KNOWN: Final = 1 << 16
"""Most keys that are kept: of stored chunks, and of running look-ups."""
_GROUP: Final = "000"


class TandemSecondaryTier(SecondaryTierManager):
    """Stores and loads rows of vLLM's host memory. vLLM's scheduler calls its methods."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        # vLLM 0.30 has no detectors: its base class has no parameter for one.
        detector = {"backpressure_detector": backpressure_detector} if backpressure_detector else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **detector)
        if primary_kv_view.strides is None:
            raise StorageConfigError("TandemSecondaryTier: vLLM's host memory has no rows")
        self._row_bytes = primary_kv_view.strides[0]
        checked = parse_settings({"kv_namespace": NAMESPACE, **settings}, 1)
        if checked.weights is None:
            raise StorageConfigError(
                "TandemSecondaryTier: set weights to the commit of the model: vLLM tells the tier "
                "its name only, under which other weights may lie later"
            )
        self._rows = primary_kv_view.cast("B")
        self._specs = (TensorSpec("chunk", "uint8", (self._row_bytes,)),)
        self._identity = _identity(offloading_spec.config, checked.weights, self._row_bytes)
        self._thread = StoreThread()
        self._client = self._thread.call(self._open(checked))
        self._look_ups: OrderedDict[bytes, Future[bool]] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._jobs: set[Future[None]] = set()
        self._results: SimpleQueue[JobResult] = SimpleQueue()
        self._has_events = bool(offloading_spec.config.enable_kv_cache_events)
        # Keys of chunks that became visible in the store, for KV events.
        self._stored: SimpleQueue[list[bytes]] = SimpleQueue()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if key in self._known:
            return LookupResult.HIT
        if (look_up := self._look_ups.get(key)) is None:
            look_up = self._look_ups[key] = self._thread.submit(self._has(self._chunk(key)))
            # Bounded: vLLM does not ask again for a request that was aborted meanwhile.
            if len(self._look_ups) > _KNOWN:
                self._look_ups.popitem(last=False)
        if not look_up.done():
            return LookupResult.RETRY
        del self._look_ups[key]
        if not look_up.result():
            return LookupResult.MISS
        self._remember(key)
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._results.get() for _ in range(self._results.qsize())]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What this tier has stored since the last call; vLLM makes KV events of it."""
        stored = [self._stored.get() for _ in range(self._stored.qsize())]
        return [OffloadingEvent(keys, self.medium, removed=False) for keys in stored]

    def has_pending_work(self) -> bool:
        return bool(self._jobs) or not self._results.empty()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        wait(tuple(self._jobs))

    def shutdown(self) -> None:
        self._thread.stop(self._client.close())

    def _submit(
        self,
        job: TransferJob,
        transfer: Callable[[Chunk, memoryview], Coroutine[Any, Any, bool]],
    ) -> None:
        pairs = [
            (key, self._row(int(row))) for key, row in zip(job.keys, job.chunk_ids, strict=True)
        ]
        future = self._thread.submit(self._run(job, pairs, transfer))
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)

    async def _run(
        self,
        job: TransferJob,
        pairs: list[tuple[bytes, memoryview]],
        transfer: Callable[[Chunk, memoryview], Coroutine[Any, Any, bool]],
    ) -> None:
        begin = time.monotonic()
        successful: list[bytes] = []
        try:
            results = await asyncio.gather(*(transfer(self._chunk(key), row) for key, row in pairs))
            successful = [key for (key, _), is_done in zip(pairs, results, strict=True) if is_done]
        finally:
            # The store may have lost them: look these chunks up again at the next request.
            for key, _ in pairs:
                self._known.pop(key, None)
            if self._has_events and successful and not job.is_promotion:
                self._stored.put(successful)
            result = JobResult(
                job_id=job.job_id,
                success=len(successful) == len(pairs),
                successful_keys=successful,
                transfer_time=time.monotonic() - begin,
                **_transfer_bytes(len(successful) * self._row_bytes),
            )
            self._results.put(result)

    async def _store(self, chunk: Chunk, row: memoryview) -> bool:
        return await self._client.store(chunk, (LayerGroup(_GROUP, self._specs, (row,)),))

    async def _load(self, chunk: Chunk, row: memoryview) -> bool:
        groups = [(_GROUP, self._specs)]
        deliver = partial(_copy, row)
        result = await self._client.load([chunk], groups, deliver, 0, limit=_LOAD_SECONDS)
        return result.chunks == 1

    async def _has(self, chunk: Chunk) -> bool:
        if not self._client.may_have(chunk):
            return False
        try:
            async with asyncio.timeout(_LOOK_UP_SECONDS):
                count, _ = await self._client.find([chunk])
        except TimeoutError:
            return False
        return count == 1

    async def _open(self, settings: StorageSettings) -> StoreClient:
        location, size = settings.location(), self._row_bytes
        # vLLM counts the jobs of a tier itself.
        return open_client(location, self._identity, NullObserver(), chunk_bytes=size)

    def _chunk(self, key: bytes) -> Chunk:
        """vLLM's hash covers the prompt up to the chunk, so the chunk needs no `previous` key."""
        name = hashlib.sha256(self._identity.digest().encode() + key).hexdigest()
        return Chunk(name, "", self._identity.chunk_tokens)

    def _row(self, index: int) -> memoryview:
        size = self._row_bytes
        return self._rows[index * size : (index + 1) * size]

    def _remember(self, key: bytes) -> None:
        self._known[key] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)


async def _copy(row: memoryview, _: int, __: str, tensors: list[memoryview]) -> None:
    [row[:]] = tensors


def _transfer_bytes(count: int) -> dict[str, int]:
    """A field of JobResult that vLLM 0.30 does not have."""
    has_field = any(field.name == "transfer_bytes" for field in fields(JobResult))
    return {"transfer_bytes": count} if has_field else {}


def _identity(config: Any, weights: str, row_bytes: int) -> KvIdentity:
    tokens = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    version = ".".join(__version__.split(".")[:2])
    layers = [name for group in config.groups for name in group.layer_names]
    return KvIdentity(
        weights=weights,
        dtype=config.model.dtype,
        layers=len(layers),
        # Unknown to the tier; the layout below covers them.
        kv_heads=0,
        head_dim=0,
        block_size=config.groups[0].tokens_per_block,
        chunk_tokens=tokens,
        layout=f"vllm-{version};offload;{config.kv_cache_layout};{row_bytes};{','.join(layers)}",
        tensor_parallel=(0, config.parallel.tp_size),
        pipeline_parallel=(0, config.parallel.pp_size),
        engine="vllm-offload",
    )
