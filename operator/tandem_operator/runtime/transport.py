"""Whether KV really moves between the pods of a set: the engines' own byte counters, read now and
then from one ready decode pod of each pool, until the counter has moved once."""

import asyncio
import random
from collections.abc import Callable
from typing import Final

import aiohttp

from tandem_contract import ports
from tandem_contract.custom_resources import DECODE_POOL
from tandem_contract.metrics import ENGINE_XFER_BYTES
from tandem_contract.paths import Role

from ..observed import PodState, PoolKey
from .known import Known, WorkKey

PERIOD: Final = 30.0
"""Seconds between looks: nobody waits for this condition."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5)
_AT_ONCE: Final = 8
_LONGEST: Final = 4 << 20
"""Bytes of a metrics page; vLLM's is about 40 KB."""
_COUNTER: Final = f"{ENGINE_XFER_BYTES}_sum".encode()


async def watch_transports(known: Known, changed: Callable[[set[WorkKey]], None]) -> None:
    """Look every `PERIOD`; a pod that does not answer is asked another time. Never returns."""
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        gate = asyncio.Semaphore(_AT_ONCE)
        while True:
            await asyncio.sleep(PERIOD * random.uniform(0.9, 1.1))
            wanted = _unverified(known)
            found = await asyncio.gather(*(_bytes(session, gate, pod) for pod in wanted.values()))
            for pool, total in zip(wanted, found, strict=True):
                if total is not None:
                    changed(set(known.moved(pool, total)))


def _unverified(known: Known) -> dict[PoolKey, PodState]:
    """A ready decode pod of every pool whose transport has not been seen at work."""
    found = {}
    for pool in known.pools.all_keys():
        if not isinstance(pool, PoolKey) or pool.kind != DECODE_POOL or known.transports.get(pool):
            continue
        ready = [
            pod
            for pod in known.pods.of(pool)
            if pod.ready and pod.address and pod.role == Role.DECODE
        ]
        if ready:
            found[pool] = random.choice(ready)
    return found


async def _bytes(
    session: aiohttp.ClientSession, gate: asyncio.Semaphore, pod: PodState
) -> float | None:
    """KV bytes the pod's engine has pulled; None when it does not say."""
    host = f"[{pod.address}]" if ":" in (pod.address or "") else pod.address
    try:
        async with gate, session.get(f"http://{host}:{ports.ENGINE_DECODE}/metrics") as answer:
            page = b""
            async for chunk in answer.content.iter_any():
                page += chunk
                if len(page) > _LONGEST:
                    return None
        return pulled_bytes(page)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None


def pulled_bytes(page: bytes) -> float | None:
    """The counter's sum over its labels in a metrics page; None when it is not there.

    Raises ValueError when its value is no number.
    """
    values = [
        float(line.rpartition(b" ")[2])
        for line in page.splitlines()
        if line.startswith((_COUNTER + b" ", _COUNTER + b"{"))
    ]
    return sum(values) if values else None
