"""Probes whether KV really moves between a set's pods, for the condition TransportVerified.

Every PERIOD seconds the operator reads the byte counter of one ready decode engine per DecodePool,
until the counter is above zero once.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final

import aiohttp

from tandem_contract import endpoints, ports
from tandem_contract.custom_resources import DECODE_POOL
from tandem_contract.metrics import ENGINE_XFER_BYTES
from tandem_contract.paths import Role

from ..observed import PodState, PoolKey
from .cache import ClusterCache, WorkKey

PERIOD: Final = 30.0
"""Seconds between probes of a pool. Long, because no decision depends on the result."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_MAX_CONCURRENT: Final = 8
_MAX_PAGE_BYTES: Final = 4 << 20
"""Largest metrics page to read; vLLM's is about 40 KB."""
_COUNTER: Final = f"{ENGINE_XFER_BYTES}_sum".encode()


async def probe_kv_transports(cache: ClusterCache, enqueue: Callable[[set[WorkKey]], None]) -> None:
    """Probe every PERIOD and enqueue the sets whose counter changed. Never returns.

    A pod that does not answer is skipped; the next probe may choose another one.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        slots = asyncio.Semaphore(_MAX_CONCURRENT)
        while True:
            await asyncio.sleep(PERIOD * random.uniform(0.9, 1.1))
            targets = _unverified_pools(cache)
            totals = await asyncio.gather(
                *(_read_counter(session, slots, pod) for pod in targets.values())
            )
            for pool, total in zip(targets, totals, strict=True):
                if total is not None:
                    enqueue(cache.set_probed(cache.kv_bytes_moved, pool, total))


def _unverified_pools(cache: ClusterCache) -> dict[PoolKey, PodState]:
    """A ready decode pod of each DecodePool whose counter is zero or unknown."""
    targets = {}
    for pool in cache.pools.all_keys():
        if not isinstance(pool, PoolKey) or pool.kind != DECODE_POOL:
            continue
        # Proven once is enough: the condition asks whether the transport works at all.
        if cache.kv_bytes_moved.get(pool):
            continue
        ready = [
            pod
            for pod in cache.pods.by_key(pool)
            if pod.ready and pod.address and pod.role == Role.DECODE
        ]
        if ready:
            # A random one: the counter of a pod that has not served a request yet stays zero.
            targets[pool] = random.choice(ready)
    return targets


async def _read_counter(
    session: aiohttp.ClientSession, slots: asyncio.Semaphore, pod: PodState
) -> float | None:
    """KV bytes that the pod's engine has pulled; None when it cannot be read."""
    page = await read_metrics(session, slots, pod)
    try:
        return counter_total(page) if page is not None else None
    except ValueError:
        return None


async def read_metrics(
    session: aiohttp.ClientSession, slots: asyncio.Semaphore, pod: PodState
) -> bytes | None:
    """The metrics page of a pod's engine; None when it does not answer."""
    # A URL needs brackets around an IPv6 address.
    host = f"[{pod.address}]" if ":" in (pod.address or "") else pod.address
    port = ports.ENGINE_PREFILL if pod.role == Role.PREFILL else ports.ENGINE_DECODE
    url = f"http://{host}:{port}{endpoints.METRICS}"
    try:
        async with slots, session.get(url) as response:
            page = b""
            async for chunk in response.content.iter_any():
                page += chunk
                # A pod may run any program: its page must not fill the operator's memory.
                if len(page) > _MAX_PAGE_BYTES:
                    return None
        return page
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def counter_total(page: bytes) -> float | None:
    """The counter's sum over its labels in a metrics page; None when the page lacks it.

    Raises ValueError when a value is no number.
    """
    values = [
        float(line.rpartition(b" ")[2])
        for line in page.splitlines()
        if line.startswith((_COUNTER + b" ", _COUNTER + b"{"))
    ]
    return sum(values) if values else None
