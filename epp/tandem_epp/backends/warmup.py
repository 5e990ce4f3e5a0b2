"""The first hand-off of each pair of pods, made here so that no client's request has to make it.

    a pod answers its first scrape, or answers again, or as another process ──► met
        └─ each ready pod that it may hand over to or from, unless they have met ──► one tiny
           hand-off through the decode pod's sidecar, tried again a few times

Two engines shake hands before the first KV crosses, which costs up to seconds; and only a decode
engine that knows the prefill engine can tell it at once that KV will not be read (PROTOCOLS). While
a pair's first hand-off is under way the pick prefers other prefill pods for this decode pod, and
after PREFERENCE seconds no more: a slow pair is better than an idle pod.

Every replica of this picker does so for itself, a moment apart. That is harmless: the second finds
the pair warm, for the price of one short prompt.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from random import Random
from time import time
from typing import Any, Final
from weakref import WeakKeyDictionary

import aiohttp
import msgspec

from tandem_contract import headers as wire
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import WARM_UP, Plan, Target, sign

from ..metrics import Metrics
from ..request import Kind
from .fleet import Fleet
from .pods import Pod, may_hand_over

AT_ONCE: Final = 4
"""Hand-offs under way. More would be felt by requests where a fleet starts."""
ATTEMPTS: Final = 3
PREFERENCE: Final = 10.0
"""Seconds for which a pair that is not warm yet is avoided."""
_JITTER: Final = 0.25
"""Seconds, at most, by which replicas of this picker miss each other."""
BACK_OFF: Final = 2.0
"""Seconds after the first attempt; three times as long after each further one."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=30.0)
"""Of one attempt: what the sidecar gives the prefill by default. A first handshake is slow."""
_BLOCKS: Final = 2
_IDS: Final = range(1, 200)
"""Token ids that every vocabulary has."""
_log: Final = logging.getLogger(__name__)


class WarmUps:
    """Sees to it that every pair of the fleet has met; on one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        keys: Callable[[], Mapping[str, bytes]],
        wanted: Callable[[], bool],
        *,
        back_off: float = BACK_OFF,
    ) -> None:
        """`keys` to sign plans with, `wanted`: whether requests may be split at all; both now."""
        self._back_off = back_off
        self._fleet, self._metrics, self._keys, self._wanted = fleet, metrics, keys, wanted
        self._met: WeakKeyDictionary[Pod, WeakKeyDictionary[Pod, tuple[bytes, bytes]]]
        self._met = WeakKeyDictionary()
        """Decode pod → prefill pod → the processes that met, or that are about to."""
        self._places = asyncio.Semaphore(AT_ONCE)
        self._running: set[asyncio.Task[None]] = set()
        self._random = Random()
        self._session: aiohttp.ClientSession | None = None

    def met(self, pod: Pod) -> None:
        """`pod` answers: warm its pairs that are not warm."""
        if not self._wanted() or not _answers(pod):
            return
        for other in self._fleet:
            for decode, prefill in ((pod, other), (other, pod)):
                if _answers(other) and _pair(decode, prefill):
                    self._meet(decode, prefill)

    def all_met(self) -> None:
        """The configuration changed: as if every pod had just come."""
        for pod in self._fleet:
            self.met(pod)

    async def close(self) -> None:
        """End what runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _meet(self, decode: Pod, prefill: Pod) -> None:
        known = self._met.setdefault(decode, WeakKeyDictionary())
        now = (decode.incarnation, prefill.incarnation)
        if known.get(prefill) == now:
            return
        known[prefill] = now
        task = asyncio.create_task(self._warm(decode, prefill))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _warm(self, decode: Pod, prefill: Pod) -> None:
        loop = asyncio.get_running_loop()
        self._prefer_others(decode, prefill, avoid=True)
        end = loop.call_later(PREFERENCE, self._prefer_others, decode, prefill)
        try:
            if not await self._tried(decode, prefill):
                # The next time one of them answers anew, they meet anew.
                self._met[decode].pop(prefill, None)
        finally:
            end.cancel()
            self._prefer_others(decode, prefill)

    def _prefer_others(self, decode: Pod, prefill: Pod, *, avoid: bool = False) -> None:
        (decode.cold.add if avoid else decode.cold.discard)(prefill)
        self._fleet.changed()

    async def _tried(self, decode: Pod, prefill: Pod) -> bool:
        """Whether the pair is warm. A loop: what it needs of a library is three lines."""
        result = ""
        for attempt in range(ATTEMPTS):
            pause = self._back_off * 3 ** (attempt - 1) if attempt else 0.0
            await asyncio.sleep(pause + self._random.uniform(0, _JITTER))
            async with self._places:
                if not (_answers(decode) and _answers(prefill)):
                    return False
                result = await self._hand_off(decode, prefill)
            self._metrics.warmups.labels(result).inc()
            if result == "warm":
                return True
        _log.warning(
            "the first hand-off from %s to %s did not work (%s, %d times): a request will pay for"
            " the handshake",
            prefill.name,
            decode.name,
            result,
            ATTEMPTS,
        )
        return False

    async def _hand_off(self, decode: Pod, prefill: Pod) -> str:
        """One attempt: warm, fallback (answered without the hand-off), error or unreachable."""
        session = self._session = self._session or aiohttp.ClientSession(timeout=_TIMEOUT)
        url = decode.backend.url.rstrip("/") + Kind.COMPLETIONS
        body = msgspec.json.encode(_body(decode, prefill, self._random))
        headers = _headers(decode, prefill, self._keys(), time())
        try:
            async with session.post(url, data=body, headers=headers) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            return "unreachable"
        if answer.status >= 400:
            return "error"
        # A sidecar that is not ours does not say which way it went.
        way = answer.headers.get(wire.ROUTING_PATH, RoutingPath.PREFILL_THEN_DECODE)
        return "warm" if way == RoutingPath.PREFILL_THEN_DECODE else "fallback"


def _answers(pod: Pod) -> bool:
    return pod.ready and pod.gauges is not None


def _pair(decode: Pod, prefill: Pod) -> bool:
    return decode.backend.role.serves(Role.DECODE) and may_hand_over(prefill, decode)


def _body(decode: Pod, prefill: Pod, random: Random) -> dict[str, Any]:
    """A prompt of its own for each, so that no cache spares the transfer; a token to answer."""
    block = max(decode.block_tokens, prefill.block_tokens)
    body = {"prompt": random.choices(_IDS, k=_BLOCKS * block + 1), "max_tokens": 1}
    theirs = prefill.backend.models
    shared = [name for name in decode.backend.models if not theirs or name in theirs] or theirs
    # Without a model an engine takes its own.
    return {"model": shared[0], **body} if shared else body


def _headers(decode: Pod, prefill: Pod, keys: Mapping[str, bytes], now: float) -> dict[str, str]:
    ident = f"warm-up-{uuid.uuid4()}"
    at = prefill.address or ""
    headers = {
        "content-type": "application/json",
        wire.REQUEST_ID: ident,
        wire.PREFILLER_HOST_PORT: at,
    }
    if keys:
        plan = Plan(
            path=RoutingPath.PREFILL_THEN_DECODE,
            reason=WARM_UP,
            decode=Target(decode.name, decode.address or ""),
            prefill=(Target(prefill.name, at),),
            request_id=ident,
            expires=now + 2 * (_TIMEOUT.total or 0),
        )
        headers[wire.PLAN] = sign(plan, keys, now=now)
    return headers
