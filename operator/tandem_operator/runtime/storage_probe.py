"""Asks engines whether they can use their external store, for the condition StorageReachable.

Every PERIOD seconds the operator reads the metrics of the ready engines of each pool whose set has
a store: the circuit breaker, and the store's last failure as the engine names it. It asks no store.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import metrics, vllm_storage
from tandem_contract.custom_resources import PREFILL_POOL

from ..observed import PodState, PoolKey, StorageReport
from ..planning.api_objects import set_key
from .cache import ClusterCache, WorkKey
from .kv_transport_probe import TIMEOUT, read_metrics

PERIOD: Final = 30.0
"""Seconds between two reports of a pool. Shorter: more requests to engines, for a condition that no
decision depends on."""
_MOST_PODS: Final = 32
"""Engines of a pool that are asked."""
_MAX_CONCURRENT: Final = 8
_BREAKERS: Final = (vllm_storage.BREAKER_STATE, metrics.ENGINE_STORAGE_BREAKER)
_FAILURES: Final = (vllm_storage.FAILURE, metrics.ENGINE_STORAGE_FAILURE)
_CLOSED: Final = 0.0
_MOST_LINE: Final = 2000
"""Bytes of a line of a metrics page that is read."""
_MOST_LINES: Final = 64
"""Lines of a metrics page that are read: a series for each engine of a pod, and some to spare."""
_MOST_CHARACTERS: Final = 200
"""Most characters of a failure's message: an engine may run any program, and the status has it."""


async def probe_storage(cache: ClusterCache, enqueue: Callable[[set[WorkKey]], None]) -> None:
    """Probe every PERIOD and enqueue the sets whose report changed. Never returns."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        slots = asyncio.Semaphore(_MAX_CONCURRENT)
        while True:
            await asyncio.sleep(PERIOD * random.uniform(0.9, 1.1))
            for pool in list(pools_with_storage(cache)):
                report = await report_of(session, slots, cache.pods.by_key(pool))
                if report is not None:
                    enqueue(cache.set_probed(cache.storage, pool, report))


def pools_with_storage(cache: ClusterCache) -> Iterator[PoolKey]:
    """Pools of sets that have a store: a DecodePool inherits it from its PrefillPool."""
    for key in cache.pools.all_keys():
        if not isinstance(key, PoolKey):
            continue
        [resource] = cache.pools.by_key(key)
        members = cache.pools.by_key(set_key(resource.body))
        prefill = [pool for pool in members if pool.key.kind == PREFILL_POOL]
        if any(_has_storage(pool.body) for pool in (resource, *prefill)):
            yield key


async def report_of(
    session: aiohttp.ClientSession, slots: asyncio.Semaphore, pods: Iterable[PodState]
) -> StorageReport | None:
    """What the ready pods of a pool say; None if none answered."""
    # Always the same ones, or the report would change by itself.
    ready = sorted((pod for pod in pods if pod.ready and pod.address), key=lambda pod: pod.name)
    asked = ready[:_MOST_PODS]
    pages = await asyncio.gather(*(read_metrics(session, slots, pod) for pod in asked))
    answers = [(pod, storage_state(page)) for pod, page in zip(asked, pages, strict=True) if page]
    if not answers:
        return None
    used = [(pod.name, state) for pod, state in answers if state is not None]
    failing = [(name, message) for name, (is_open, message) in used if is_open]
    return StorageReport(
        len(used), tuple(name for name, _ in failing), failing[0][1] if failing else ""
    )


def storage_state(page: bytes) -> tuple[bool, str] | None:
    """Whether the engine's circuit breaker is open, or half so, and the store's last failure.

    None: the page does not say, as before the engine has used the store.
    """
    breaker: float | None = None
    message = ""
    # An engine may run any program: neither a strange page nor a long one may stop the operator.
    names = tuple(name.encode() for name in (*_BREAKERS, *_FAILURES))
    lines = [line for line in page.split(b"\n") if line.startswith(names)]
    lines = [line for line in lines if len(line) <= _MOST_LINE][:_MOST_LINES]
    try:
        for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode()):
            for sample in family.samples:
                if sample.name in _BREAKERS:
                    breaker = max(breaker or _CLOSED, sample.value)
                elif sample.name in _FAILURES and sample.value == 1.0:
                    message = sample.labels.get("message", "")[:_MOST_CHARACTERS]
    except (ValueError, IndexError, ArithmeticError):
        return None
    return None if breaker is None else (breaker != _CLOSED, message)


def _has_storage(body: object) -> bool:
    node = body
    for step in ("spec", "transfer", "storage"):
        node = node.get(step) if isinstance(node, dict) else None
    return bool(node)
