"""Edits that make a client's body the body of a prefill leg or a decode leg.

A prefill leg generates one token and nothing else: no stream, no stop condition that could end it
before that token, and nothing is stored. What shapes the prompt stays: tools, structured output.
`tandem_contract.api_grammar` has the cap of each API.

Every edit leaves what it does not name as it was: unknown fields, key order, large integers.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.api_grammar import GRAMMARS, Cap
from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind
from tandem_contract.response_ids import new_response_id
from tandem_contract.transfer_params import FIELD, PROMPT_TOKEN_IDS, REQUEST_ID

from .parse import UNREADABLE, Body, Members, decode_members, to_bad_body

_NULL: Final = Raw(b"null")
_OFF: Final = frozenset({b"null", b"false"})


class _Message(msgspec.Struct):
    content: Raw = _NULL


class _Prompt(msgspec.Struct):
    prompt_token_ids: list[int]


class _Part(msgspec.Struct):
    """A part of a message, or another object with a type."""

    type: str = ""


_messages: Final = msgspec.json.Decoder(list[_Message])
_parts: Final = msgspec.json.Decoder(list[_Part])
_part: Final = msgspec.json.Decoder(_Part)
_prompt: Final = msgspec.json.Decoder(_Prompt)


def add_member(body: Body, name: str, value: bytes) -> bytes:
    """Encode the body with one more member, after the others; `value` is encoded JSON."""
    return _append(body.data, name, value, b"," if body.members else b"")


def add_member_to_object(data: bytes, name: str, value: bytes) -> bytes:
    """The same for an encoded JSON object that is not empty."""
    return _append(data, name, value, b",")


def add_transfer_params(body: Body, params: bytes, prompt_token_ids: bytes = b"") -> bytes:
    """Encode the body of a decode leg, with `kv_transfer_params` that are `params`, an encoded
    object, and name the prompt's ids: those that the body has there, or else `prompt_token_ids`, an
    encoded list; empty: neither, and the engine renders the messages."""
    if FIELD in body.members:
        return replace_members(body.members, {FIELD: _with_ids_of(body, Raw(params))})
    if prompt_token_ids:
        params = add_member_to_object(params, PROMPT_TOKEN_IDS, prompt_token_ids)
    return add_member(body, FIELD, params)


def with_prompt_of(body: Body, data: bytes) -> Body:
    """The body, with the ids of the prompt that the trusted request `data` has in
    `kv_transfer_params`, which `parse_body` removed. Raises BadBody where they are none."""
    params = decode_members(data).get(FIELD, _NULL)
    # A chat that an engine rendered has null.
    if params == _NULL:
        return body
    try:
        value = msgspec.json.encode(_prompt.decode(params))
    except UNREADABLE as err:
        raise to_bad_body(err) from err
    return Body(add_member(body, FIELD, value), {**body.members, FIELD: Raw(value)})


def with_response_id(kind: RequestKind, body: Body, backend: str) -> Body:
    """The body of a responses request with an id that tells that `backend` stores the response;
    other bodies as they are."""
    if kind is not RequestKind.RESPONSES:
        return body
    value = msgspec.json.encode(new_response_id(backend))
    return Body(add_member(body, REQUEST_ID, value), {**body.members, REQUEST_ID: Raw(value)})


def replace_members(
    members: Members, changes: Mapping[str, Any], drop: Collection[str] = ()
) -> bytes:
    """Encode the object with `changes` set, new keys last, and without the keys in `drop`."""
    remaining: dict[str, Any] = {k: v for k, v in members.items() if k not in drop}
    return msgspec.json.encode(remaining | dict(changes))


def cap_to_one_token(kind: RequestKind, body: Body, changes: dict[str, Any]) -> bytes:
    """Encode the body of a prefill leg: limited to one token, with `changes` set besides.

    Ids of the prompt that the body has in `kv_transfer_params` stay there.
    """
    cap = GRAMMARS[kind].cap
    members = body.members
    drop = cap.drop
    for name, type_ in cap.drop_typed.items():
        if name in members and _has_type(members[name], type_):
            drop |= {name}
    set_last = changes
    if FIELD in members and FIELD in changes:
        params = Raw(msgspec.json.encode(changes[FIELD]))
        set_last = changes | {FIELD: _with_ids_of(body, params)}
    if cap.sampling is not None and SAMPLING_PARAMS in members:
        sampling = _cap_sampling(members[SAMPLING_PARAMS], cap.sampling)
        set_last = {SAMPLING_PARAMS: sampling} | set_last
    return replace_members(members, {**cap.changes, **set_last}, drop)


def can_reuse_token_ids(members: Members) -> bool:
    """Whether the decode engine may take a chat's token ids instead of rendering its messages.

    True for text-only chats that do not ask for the rendered prompt. False as well for a chat that
    cannot be parsed: the engine refuses it, or renders it itself.
    """
    if _is_on(members, "echo") or _is_on(members, "return_prompt_text"):
        return False
    try:
        messages = _messages.decode(members.get("messages", _NULL))
        return all(_is_text(message.content) for message in messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _with_ids_of(body: Body, params: Raw) -> Raw:
    """`params` with the prompt's ids that the body has in its own."""
    ids = decode_members(body.members[FIELD])[PROMPT_TOKEN_IDS]
    return Raw(add_member_to_object(bytes(params), PROMPT_TOKEN_IDS, bytes(ids)))


def _append(data: bytes, name: str, value: bytes, comma: bytes) -> bytes:
    # Written into the encoded object, so that its other bytes stay as the client sent them.
    return b'%b%b"%b":%b}' % (data[: data.rindex(b"}")], comma, name.encode(), value)


def _cap_sampling(raw: Raw, cap: Cap) -> Raw:
    """Cap the sampling parameters; a value that is no object is left for the engine to refuse."""
    try:
        members = decode_members(raw)
    except msgspec.ValidationError:
        return raw
    return Raw(replace_members(members, cap.changes, cap.drop))


def _has_type(raw: Raw, type_: str) -> bool:
    try:
        return _part.decode(raw).type == type_
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _is_on(members: Members, name: str) -> bool:
    return name in members and bytes(members[name]) not in _OFF


def _is_text(content: Raw) -> bool:
    # Content is a string, null or a list of parts, and only parts can be media.
    if bytes(memoryview(content)[:1]) != b"[":
        return True
    return all(part.type == "text" for part in _parts.decode(content))
