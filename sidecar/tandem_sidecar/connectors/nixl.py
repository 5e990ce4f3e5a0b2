"""NIXL pull (vLLM's NixlConnector): the prefill's answer names the KV that decode reads.

1. Prefill leg: the client's body capped to one token; `kv_transfer_params` ask to hold the KV.
2. Decode leg: the client's body with the `kv_transfer_params` of the prefill's answer, verbatim.
3. Release: a request that the decode engine refuses before it admits it (unknown model, 404). The
   refusal makes the engine tell the producer to free the blocks.

Tokenize once: for a text-only chat the prefill is asked for its token ids, and the decode leg
carries them as `prompt_token_ids` of the object, so that the decode engine does not render the
messages again. vLLM checks only that they are ids of its vocabulary. That is enough: the engine
reads as much KV as there are ids, and the KV was computed from these ids, so both legs have the
same prompt even if their chat templates differ.

Streamed hand-offs: if both engines say that they can (the prefill in an earlier answer, the decode
engine in the head of one), both legs are sent at once, and the decode engine reads the KV while the
prefill computes it. Both legs name the attempt's id, and the decode leg the prefill engine's id, as
that earlier answer gave it. A restarted prefill engine refuses the read; its answer tells the new
id, and the decode leg is then sent once more, as in 2. vLLM 0.32 does neither, so with it every
hand-off is sequential.
"""

import logging
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.commandline import HostPort, is_loopback
from tandem_contract.concurrent_params import STREAM, DecodeStream, PrefillStream, StreamSource
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.transfer_params import (
    FIELD,
    PREFILL_LEG,
    ParamsUnusable,
    TransferParams,
    read_transfer_params,
)

from ..bodies.edit import add_member_to_object, add_transfer_params, cap_to_one_token
from ..bodies.parse import Body
from ..bodies.usage import read_cached_tokens, read_created_tokens
from .protocol import (
    ConnectorOptions,
    HandoffAttempt,
    KvHold,
    ReleaseRequest,
    read_answer,
    token_ids_of,
    token_ids_request,
)

log: Final = logging.getLogger(__name__)

RELEASE_MODEL: Final = "tandem-release-kv"
"""A model name that no engine serves."""

_RELEASE_TARGET: Final = PATHS[RequestKind.COMPLETIONS].encode()
_PREFILL_LEG: Final = Raw(PREFILL_LEG)
_PULL: Final = "pull"
_MESSAGES_USAGE: Final = b"cache_creation_input_tokens"
_MAX_SOURCES: Final = 1024
"""Prefill pods whose engine is remembered: without signed plans any address of the allow-list may
be named."""


class Nixl:
    """The connector for pulled KV. It remembers which prefill engines serve streams."""

    release_is_notification = True
    decode_may_wait_forever = False
    transfer_mode = _PULL

    def __init__(self, options: ConnectorOptions | None = None) -> None:
        self._options = options or ConnectorOptions()
        self._sources: dict[HostPort, StreamSource] = {}
        self.loopback_sources: set[HostPort] = set()
        """Prefill pods that name an address such as localhost for their KV."""

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        members = self._prefill_members(kind, body)
        if attempt.source is not None:
            stream = msgspec.json.encode(PrefillStream(attempt.attempt_id))
            members[FIELD] = Raw(add_member_to_object(PREFILL_LEG, STREAM, stream))
        return cap_to_one_token(kind, body, members)

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        fields = read_answer(answer)
        raw = bytes(fields.kv_transfer_params)
        params = read_transfer_params(raw)
        self._check(params, attempt.prefill)
        # vLLM from 0.32 on: the decode engine reports the count that it reads in this object. The
        # decode leg of a stream had no such object yet.
        reported = params.remote_prefill_cached_tokens is not None and attempt.source is None
        source = self._remember(attempt.prefill, params)
        return KvHold(
            raw,
            cached_tokens=None if reported else read_cached_tokens(answer),
            created_tokens=read_created_tokens(answer) if _MESSAGES_USAGE in answer else None,
            prompt_token_ids=token_ids_of(fields),
            attempt_id=attempt.attempt_id,
            is_unexpected=attempt.source is not None and not attempt.source.is_engine(source),
        )

    def decode_body(self, _kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        return add_transfer_params(body, kv_hold.transfer_params, kv_hold.prompt_token_ids)

    def release_request(
        self, _kind: RequestKind, _body: Body, kv_hold: KvHold
    ) -> ReleaseRequest | None:
        return refused_request(kv_hold)

    # ConcurrentLegs

    def expected_kv_hold(self, attempt: HandoffAttempt) -> KvHold | None:
        if attempt.source is None:
            return None
        stream = DecodeStream(attempt.attempt_id, attempt.source)
        return KvHold(msgspec.json.encode({STREAM: stream}), attempt_id=attempt.attempt_id)

    def stream_source(self, prefill: HostPort) -> StreamSource | None:
        return self._sources.get(prefill)

    def forget_source(self, prefill: HostPort) -> None:
        self._sources.pop(prefill, None)

    def _remember(self, prefill: HostPort, params: TransferParams) -> StreamSource | None:
        """Keep the engine that computed this KV, if it serves streams."""
        self._sources.pop(prefill, None)
        if not params.tandem_serves_streams or self.transfer_mode != _PULL:
            return None
        source = StreamSource(
            params.remote_engine_id,
            params.remote_host,
            params.remote_port,
            params.tandem_producer_proof,
        )
        self._sources[prefill] = source
        # The pod that answered longest ago comes first.
        if len(self._sources) > _MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        return source

    def _check(self, params: TransferParams, prefill: HostPort) -> None:
        """Raise ParamsUnusable if the decode engine could not read the KV these name."""
        if is_loopback(params.remote_host) and prefill not in self.loopback_sources:
            self._warn_of_loopback(params.remote_host, prefill)
        if params.transfer_mode not in (None, self.transfer_mode):
            raise ParamsUnusable(
                f"{FIELD}.transfer_mode is {params.transfer_mode}, expected {self.transfer_mode}:"
                " the prefill pod uses another connector"
            )

    def _warn_of_loopback(self, host: str, prefill: HostPort) -> None:
        """Once per pod: the decode engine may run on the same machine, then it finds the KV."""
        if is_loopback(prefill.host) or len(self.loopback_sources) >= _MAX_SOURCES:
            return
        self.loopback_sources.add(prefill)
        log.warning(
            "the prefill engine %s names %s as the address of its KV, which decode engines on other"
            " machines look for on their own: set VLLM_NIXL_SIDE_CHANNEL_HOST of that engine",
            prefill,
            host,
        )

    def _prefill_members(self, kind: RequestKind, body: Body) -> dict[str, Any]:
        return {FIELD: _PREFILL_LEG} | token_ids_request(self._options, kind, body)


def refused_request(kv_hold: KvHold) -> ReleaseRequest:
    """A completion for an unknown model: its 404 makes the decode engine notify the producer.

    The other kinds except generate would do the same; a completion has the smallest body.
    """
    body = {
        "model": RELEASE_MODEL,
        "prompt": "x",
        "max_tokens": 1,
        FIELD: Raw(kv_hold.transfer_params),
    }
    return ReleaseRequest(_RELEASE_TARGET, msgspec.json.encode(body), expected_status=404)
