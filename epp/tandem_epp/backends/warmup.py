"""Warm-up: the first hand-off of each prefill/decode pair, before a client's request needs it.

    a pod answers its first scrape, or again, or as another process ──► on_backend_up
        └─ for each ready pod that it can hand off to or from, unless this pair of processes is
           warm already ──► one tiny hand-off (`HandOffs`), with retries

Two engines shake hands before the first KV transfer, which takes up to seconds; and a decode engine
can tell a prefill engine to free KV at once, instead of at the end of its lease, only after that
handshake. While a pair's first hand-off is under way, the picker prefers other prefill pods for
this decode pod, for AVOID_SECONDS at most: a slow pair is better than an idle pod.

Every replica warms all pairs, a moment apart from the others. A pair that another replica has
warmed costs one short prompt.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Final, Protocol

from tandem_contract.paths import Role

from .fleet import Fleet
from .pods import Pod

MAX_CONCURRENT: Final = 4
"""Warm-ups under way at once. More would slow down requests while a fleet starts."""
ATTEMPTS: Final = 3
AVOID_SECONDS: Final = 10.0
"""Seconds for which the picker prefers other pairs to one that is being warmed."""
_JITTER: Final = 0.25
"""Seconds; each attempt waits a random part of it, so that EPP replicas do not coincide."""
BACK_OFF: Final = 2.0
"""Seconds before the second attempt; three times as long before each further one."""
_log: Final = logging.getLogger(__name__)


class HandOffs(Protocol):
    """Makes the hand-off of a warm-up: an EPP through a sidecar, a router by itself."""

    async def hand_off(self, decode: Pod, prefill: Pod) -> str:
        """One attempt. Returns `warm`, `fallback` (a 2xx or 3xx without the hand-off), `error` (a
        4xx or 5xx) or `unreachable` (no answer in time)."""

    async def close(self) -> None:
        """Close what it has open."""


class WarmUps:
    """Warms every pair of the fleet once per pair of processes; on one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        count_result: Callable[[str], None],
        hand_offs: HandOffs,
        is_enabled: Callable[[], bool],
        *,
        back_off: float = BACK_OFF,
    ) -> None:
        """`count_result` takes the result of each attempt (see `HandOffs`). `is_enabled` returns
        whether requests may be split at all. `back_off` is in seconds."""
        self.hand_offs = hand_offs
        self._back_off = back_off
        self._fleet, self._count_result, self._is_enabled = fleet, count_result, is_enabled
        self._warmed: defaultdict[int, dict[int, tuple[bytes | None, bytes | None]]]
        self._warmed = defaultdict(dict)
        """Number of a decode pod → that of a prefill pod → incarnations of both that are warm or
        being warmed."""
        self._concurrency = asyncio.Semaphore(MAX_CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = Random()

    def on_backend_up(self, pod: Pod) -> None:
        """`pod` answers scrapes: warm its pairs that are not warm."""
        self._forget_pods()
        self._warm_pairs(pod)

    def warm_all(self) -> None:
        """Warm every pair that is not warm, after the configuration changed."""
        self._forget_pods()
        for pod in self._fleet:
            self._warm_pairs(pod)

    def _warm_pairs(self, pod: Pod) -> None:
        if not self._is_enabled() or not _has_answered(pod):
            return
        for other in self._fleet:
            for decode, prefill in ((pod, other), (other, pod)):
                if _has_answered(other) and self._is_pair(decode, prefill):
                    self._start(decode, prefill)

    async def close(self) -> None:
        """Cancel the warm-ups under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.hand_offs.close()

    def _forget_pods(self) -> None:
        """Forget the pairs of pods that have left the fleet."""
        numbers = {pod.number for pod in self._fleet}
        for decode in self._warmed.keys() - numbers:
            del self._warmed[decode]
        for by_prefill in self._warmed.values():
            for prefill in by_prefill.keys() - numbers:
                del by_prefill[prefill]

    def _is_pair(self, decode: Pod, prefill: Pod) -> bool:
        serves_decode = decode.backend.role.serves(Role.DECODE)
        return serves_decode and self._fleet.can_exchange(prefill, decode)

    def _start(self, decode: Pod, prefill: Pod) -> None:
        by_prefill = self._warmed[decode.number]
        processes = (decode.incarnation, prefill.incarnation)
        if by_prefill.get(prefill.number) == processes:
            return
        # Recorded before the first await, so that a second scrape starts no second warm-up.
        by_prefill[prefill.number] = processes
        task = asyncio.create_task(self._warm(decode, prefill))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm(self, decode: Pod, prefill: Pod) -> None:
        loop = asyncio.get_running_loop()
        self._mark_unwarmed(decode, prefill)
        # A warm-up with retries takes longer than AVOID_SECONDS; the pair is then used anyway.
        timer = loop.call_later(AVOID_SECONDS, self._unmark_unwarmed, decode, prefill)
        try:
            if not await self._attempt(decode, prefill):
                # Forget the pair: the next time one of the two comes up, it is warmed again.
                self._warmed[decode.number].pop(prefill.number, None)
        finally:
            # Also when the task is cancelled: a pod must not stay avoided for ever.
            timer.cancel()
            self._unmark_unwarmed(decode, prefill)

    def _mark_unwarmed(self, decode: Pod, prefill: Pod) -> None:
        decode.unwarmed_prefills.add(prefill)
        self._fleet.invalidate_views()

    def _unmark_unwarmed(self, decode: Pod, prefill: Pod) -> None:
        decode.unwarmed_prefills.discard(prefill)
        self._fleet.invalidate_views()

    async def _attempt(self, decode: Pod, prefill: Pod) -> bool:
        """Up to ATTEMPTS hand-offs; returns whether the pair is warm."""
        result = ""
        for attempt in range(ATTEMPTS):
            pause = self._back_off * 3 ** (attempt - 1) if attempt else 0.0
            # Outside the semaphore: a pair that pauses must not keep others from their turn.
            await asyncio.sleep(pause + self._random.uniform(0, _JITTER))
            async with self._concurrency:
                # Checked here, because the pair may have waited long for its turn.
                if not (_has_answered(decode) and _has_answered(prefill)):
                    return False
                decode.estimates.placed_transfers.begin_warm_up()
                try:
                    result = await self.hand_offs.hand_off(decode, prefill)
                finally:
                    decode.estimates.placed_transfers.end_warm_up()
            self._count_result(result)
            if result == "warm":
                return True
        _log.warning(
            "warm-up failed: no hand-off from prefill pod %s to decode pod %s in %d attempts, the"
            " last one ended with: %s; the first request of this pair waits for the handshake",
            prefill.name,
            decode.name,
            ATTEMPTS,
            result,
        )
        return False


def _has_answered(pod: Pod) -> bool:
    return pod.ready and pod.gauges is not None
