"""The body of a request: the EPP's reading, and the sidecar's edits for both legs.

First byte: the kind of the request. The rest: the body.
"""

import json
from contextlib import suppress
from typing import Any

from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind
from tandem_contract.transfer_params import CLIENT_FORBIDDEN, FIELD
from tandem_epp.request.body_fields import BadBody as RefusedByEpp
from tandem_epp.request.inference import parse_request
from tandem_sidecar.bodies.edit import add_member, can_reuse_token_ids, cap_to_one_token
from tandem_sidecar.bodies.parse import BadBody, Body, clean_passthrough, parse_body

_KINDS = tuple(RequestKind)
_MERGED = ("vllm_xargs", "extra_args")
"""Objects that vLLM merges into the dictionary with its own kv_transfer_params."""


def check(data: bytes) -> None:
    kind, text = _KINDS[(data[0] if data else 0) % len(_KINDS)], data[1:]
    with suppress(RefusedByEpp):
        parse_request(kind, text)
    try:
        body = parse_body(text)
        text.decode()
    except (BadBody, UnicodeDecodeError):
        # Texts in a body that are not UTF-8 are left to the engine, whose parser refuses them.
        return
    sent, read = _object(text), _object(body.data)
    assert _forbidden(read) == []
    for name in CLIENT_FORBIDDEN:
        sent.pop(name, None)
    assert list(read) == list(sent), "a member was lost or moved"
    assert [read[name] for name in read if name not in (*_MERGED, SAMPLING_PARAMS)] == [
        sent[name] for name in sent if name not in (*_MERGED, SAMPLING_PARAMS)
    ]
    assert parse_body(body.data).data == body.data
    assert _object(clean_passthrough(text, b"application/json")) == read
    _check_legs(kind, body, read)


def _check_legs(kind: RequestKind, body: Body, read: dict[str, Any]) -> None:
    decode = _object(add_member(body, FIELD, b'{"remote_host":"h"}'))
    assert decode == read | {FIELD: {"remote_host": "h"}}
    prefill = _object(cap_to_one_token(kind, body, {FIELD: "given"}))
    assert prefill[FIELD] == "given"
    assert prefill["stream"] is False
    can_reuse_token_ids(body.members)


def _forbidden(members: dict[str, Any]) -> list[str]:
    """Forbidden names at the top, and in the objects that vLLM merges."""
    found = [name for name in members if name in CLIENT_FORBIDDEN]
    for name in (*_MERGED, SAMPLING_PARAMS):
        inner = members.get(name)
        if isinstance(inner, dict):
            merged = inner if name in _MERGED else inner.get("extra_args")
            if isinstance(merged, dict):
                found += [key for key in merged if key in CLIENT_FORBIDDEN]
    return found


def _object(text: bytes) -> dict[str, Any]:
    """The body as Python's own parser reads it; numbers as they are written."""
    read = json.loads(text, parse_int=str, parse_float=str)
    assert isinstance(read, dict)
    return read
