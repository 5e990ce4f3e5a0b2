"""Storage (Tandem's own connector): KV moves through an external store, never between the pods.

1. Prefill leg: the client's body capped to one token; `kv_transfer_params` ask to store the KV.
2. The prefill engine answers when the store shows the KV, with a KvReference to it.
3. Decode leg: the client's body with that reference and `kv_transfer_timeout`. The decode engine
   loads what the reference covers, within this time, and computes the rest.

A reference has neither an endpoint nor credentials: each engine uses the store and the namespace in
its own configuration, and refuses a path outside of them. Stored KV stays for the next request with
the same prompt, so there is nothing to release.

If the prefill engine answers without parameters, the decode engine looks the prompt up by itself,
and may find that not all of it is stored yet.
"""

from typing import Any, Final

import msgspec

from tandem_contract.kv_reference import (
    MAX_TIMEOUT,
    SHORT,
    STORE,
    KvReferenceUnusable,
    LoadLeg,
    StoreLeg,
    read_reference,
)
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import FIELD, ParamsUnusable

from ..bodies.edit import add_transfer_params, cap_to_one_token
from ..bodies.parse import Body
from ..bodies.usage import read_cached_tokens
from .protocol import (
    ConnectorOptions,
    HandoffAttempt,
    KvHold,
    PrefillAnswer,
    ReleaseRequest,
    read_answer,
    token_ids_of,
    token_ids_request,
)

_NAMES_NOTHING: Final = frozenset({b"null", b"{}"})


class _StoredKv(msgspec.Struct):
    """StoreAnswer as it arrives: the reference is checked by `read_reference`."""

    tandem_kv_reference: dict[str, Any] | None = None
    tandem_kv_not_stored: str | None = None


_decoder: Final = msgspec.json.Decoder(_StoredKv)


class Storage:
    """The connector. It holds no state."""

    release_is_notification = True
    decode_may_wait_forever = False

    def __init__(self, options: ConnectorOptions | None = None) -> None:
        self._options = options or ConnectorOptions()

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        store = StoreLeg(min(attempt.transfer_timeout, MAX_TIMEOUT))
        members = {FIELD: {STORE: store}} | token_ids_request(self._options, kind, body)
        return cap_to_one_token(kind, body, members)

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        fields = read_answer(answer)
        params = _load_params(attempt, fields)
        return KvHold(
            params,
            # The decode engine counts all tokens that it loaded as cached.
            cached_tokens=read_cached_tokens(answer),
            prompt_token_ids=token_ids_of(fields) if params else b"",
            attempt_id=attempt.attempt_id,
        )

    def decode_body(self, _kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        params = kv_hold.transfer_params
        if not params:
            return body.data
        return add_transfer_params(body, params, kv_hold.prompt_token_ids)

    def release_request(
        self, _kind: RequestKind, _body: Body, _kv_hold: KvHold
    ) -> ReleaseRequest | None:
        return None


def _load_params(attempt: HandoffAttempt, fields: PrefillAnswer) -> bytes:
    """The decode leg's object; empty: nothing is named. Raises ParamsUnusable."""
    raw = bytes(fields.kv_transfer_params)
    if raw in _NAMES_NOTHING:
        return b""
    try:
        stored = _decoder.decode(raw)
        if stored.tandem_kv_reference is None:
            return _without_reference(stored.tandem_kv_not_stored)
        reference = read_reference(stored.tandem_kv_reference)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    except KvReferenceUnusable as err:
        raise ParamsUnusable(f"{FIELD}.{err}") from err
    return msgspec.json.encode(LoadLeg(reference, min(attempt.transfer_timeout, MAX_TIMEOUT)))


def _without_reference(reason: str | None) -> bytes:
    if reason in (None, SHORT):
        return b""
    raise ParamsUnusable(f"the prefill engine did not store the prompt's KV: {reason}")
