"""The hand-off of a warm-up: its prompt, and the request to the sidecar of a decode pod."""

import ssl
import uuid
from collections.abc import Callable, Mapping
from random import Random
from time import time
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import headers as wire
from tandem_contract.config import Backend
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import WARM_UP, Plan, Target, sign
from tandem_contract.request_kinds import PATHS, RequestKind

from .http2_client import Http2Client
from .pods import Pod

ATTEMPT_SECONDS: Final = 30.0
"""For one attempt: the sidecar's default prefill timeout. A first handshake is slow."""
_PROMPT_BLOCKS: Final = 2
_TOKEN_IDS: Final = range(1, 200)
"""Token ids that every vocabulary has."""


class SidecarHandOffs:
    """Asks the sidecar of the decode pod; it is the EPP's `warmup.HandOffs`."""

    def __init__(self, plan_keys: Callable[[], Mapping[str, bytes]]) -> None:
        """`plan_keys` returns the current keys to sign plans with."""
        self._plan_keys = plan_keys
        self._random = Random()
        self.tls: ssl.SSLContext | None = None
        """For sidecars with https; None: certificates of the system's authorities."""
        self._session: aiohttp.ClientSession | None = None
        self._http2 = Http2Client()

    async def hand_off(self, decode: Pod, prefill: Pod) -> str:
        """See `warmup.HandOffs`."""
        body = msgspec.json.encode(warm_up_body(decode, prefill, self._random))
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
            answer = await self._http2.request(
                "POST", url, ATTEMPT_SECONDS, headers=headers, body=body
            )
            return answer.status, answer.headers.get(wire.ROUTING_PATH)
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=ATTEMPT_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout)
        post = self._session.post(url, data=body, headers=headers, ssl=self.tls or True)
        async with post as response:
            await response.read()
        return response.status, response.headers.get(wire.ROUTING_PATH)

    async def close(self) -> None:
        """Close the connections."""
        await self._http2.close()
        if self._session is not None:
            await self._session.close()


def warm_up_body(decode: Pod, prefill: Pod, random: Random) -> dict[str, Any]:
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
            expires=now + 2 * ATTEMPT_SECONDS,
            alternates=(),
        )
        headers[wire.PLAN] = sign(plan, plan_keys, now=now)
    return headers
