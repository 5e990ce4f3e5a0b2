"""Warm-up: the first hand-off of each prefill/decode pair, before a client's request needs it.

    a pod answers its first scrape, or again, or as another process ──► on_backend_up
        └─ for each ready pod that it can hand off to or from, unless this pair of processes is
           warm already ──► one tiny hand-off through the decode pod's sidecar, with retries

Two engines shake hands before the first KV transfer, which takes up to seconds; and a decode engine
can tell a prefill engine to free KV at once, instead of at the end of its lease, only after that
handshake. While a pair's first hand-off is under way, the picker prefers other prefill pods for
this decode pod, for AVOID_SECONDS at most: a slow pair is better than an idle pod.

Every EPP replica warms all pairs, a moment apart from the others. A pair that another replica has
warmed costs one short prompt.
"""

import asyncio
import logging
import ssl
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from random import Random
from time import time
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import headers as wire
from tandem_contract.config import Backend
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import WARM_UP, Plan, Target, sign
from tandem_contract.request_kinds import PATHS, RequestKind

from .fleet import Fleet
from .http2_client import Http2Client
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
_SECONDS: Final = 30.0
"""For one attempt: the sidecar's default prefill timeout. A first handshake is slow."""
_PROMPT_BLOCKS: Final = 2
_TOKEN_IDS: Final = range(1, 200)
"""Token ids that every vocabulary has."""
_log: Final = logging.getLogger(__name__)


class WarmUps:
    """Warms every pair of the fleet once per pair of processes; on one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        count_result: Callable[[str], None],
        plan_keys: Callable[[], Mapping[str, bytes]],
        is_enabled: Callable[[], bool],
        *,
        back_off: float = BACK_OFF,
    ) -> None:
        """`count_result` takes the result of each attempt (see `_hand_off`). `plan_keys` returns
        the current keys to sign plans with; `is_enabled` whether requests may be split at all.
        `back_off` is in seconds."""
        self._back_off = back_off
        self._fleet, self._count_result = fleet, count_result
        self._plan_keys, self._is_enabled = plan_keys, is_enabled
        self._warmed: defaultdict[int, dict[int, tuple[bytes | None, bytes | None]]]
        self._warmed = defaultdict(dict)
        """Number of a decode pod → that of a prefill pod → incarnations of both that are warm or
        being warmed."""
        self._concurrency = asyncio.Semaphore(MAX_CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = Random()
        self.tls: ssl.SSLContext | None = None
        """For sidecars with https; None: certificates of the system's authorities."""
        self._session: aiohttp.ClientSession | None = None
        self._http2 = Http2Client()

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
        await self._http2.close()
        if self._session is not None:
            await self._session.close()

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
                    result = await self._hand_off(decode, prefill)
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

    async def _hand_off(self, decode: Pod, prefill: Pod) -> str:
        """One attempt. Returns `warm`, `fallback` (a 2xx or 3xx without the hand-off), `error` (a
        4xx or 5xx) or `unreachable` (no answer within the timeout)."""
        body = msgspec.json.encode(_body(decode, prefill, self._random))
        headers = _headers(decode, prefill, self._plan_keys(), time())
        try:
            status, path = await self._post(decode.backend, body, headers)
        except (aiohttp.ClientError, OSError):
            return "unreachable"
        if status >= 400:
            return "error"
        # Sidecars other than Tandem's do not send this header: take their 2xx for a hand-off.
        return "warm" if path in (None, RoutingPath.PREFILL_THEN_DECODE) else "fallback"

    async def _post(
        self, backend: Backend, body: bytes, headers: dict[str, str]
    ) -> tuple[int, str | None]:
        """Status and routing path of the answer, which is read to its end: before that the hand-off
        is not complete. Raises ClientError, OSError."""
        url = backend.url.rstrip("/") + PATHS[RequestKind.COMPLETIONS]
        if backend.http2:
            answer = await self._http2.request("POST", url, _SECONDS, headers=headers, body=body)
            return answer.status, answer.headers.get(wire.ROUTING_PATH)
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout)
        post = self._session.post(url, data=body, headers=headers, ssl=self.tls or True)
        async with post as response:
            await response.read()
        return response.status, response.headers.get(wire.ROUTING_PATH)


def _has_answered(pod: Pod) -> bool:
    return pod.ready and pod.gauges is not None


def _body(decode: Pod, prefill: Pod, random: Random) -> dict[str, Any]:
    """A completion of one token for a random prompt, so that no cache avoids the transfer."""
    block = max(decode.block_tokens, prefill.block_tokens)
    prompt = random.choices(_TOKEN_IDS, k=_PROMPT_BLOCKS * block + 1)
    body = {"prompt": prompt, "max_tokens": 1}
    models, others = decode.backend.models, prefill.backend.models
    shared = [name for name in models if not others or name in others] or others
    # Without a model the engine takes its own.
    return {"model": shared[0], **body} if shared else body


def _headers(
    decode: Pod, prefill: Pod, plan_keys: Mapping[str, bytes], now: float
) -> dict[str, str]:
    request_id = f"warm-up-{uuid.uuid4()}"
    prefill_address = prefill.address or ""
    headers = {
        "content-type": "application/json",
        wire.REQUEST_ID: request_id,
        wire.PREFILLER_HOST_PORT: prefill_address,
    }
    if plan_keys:
        plan = Plan(
            path=RoutingPath.PREFILL_THEN_DECODE,
            reason=WARM_UP,
            decode=Target(decode.name, decode.address or "", decode.rank),
            prefill=(Target(prefill.name, prefill_address, prefill.rank),),
            request_id=request_id,
            # Twice the timeout, because the clocks of two nodes may differ.
            expires=now + 2 * _SECONDS,
        )
        headers[wire.PLAN] = sign(plan, plan_keys, now=now)
    return headers
