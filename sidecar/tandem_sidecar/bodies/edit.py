"""Edits that make a client's body the body of a prefill leg or a decode leg.

A prefill leg generates one token and nothing else: no stream, no stop condition that could end it
before that token (Mooncake hands KV off only if a request ended by length), and nothing is stored.
What shapes the prompt stays: tools, structured output, thinking.

Every edit leaves what it does not name as it was: unknown fields, key order, large integers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind

from .parse import Body, Members, decode_members


@dataclass(frozen=True, slots=True)
class _Cap:
    """How one kind is cut to one token: members to set and to remove.

    `sampling` is set inside the sampling parameters instead of at the top.
    """

    changes: dict[str, Any]
    drop: frozenset[str] = frozenset()
    sampling: dict[str, Any] = field(default_factory=dict)


_ONE_TOKEN: Final = {"max_tokens": 1, "min_tokens": 1, "ignore_eos": True}
_STOPS: Final = frozenset({"stop", "stop_token_ids"})
_OPENAI: Final = _STOPS | {"stream_options", "return_token_ids"}

_CAPS: Final[Mapping[RequestKind, _Cap]] = {
    RequestKind.COMPLETIONS: _Cap({"stream": False, **_ONE_TOKEN}, _OPENAI),
    RequestKind.CHAT: _Cap({"stream": False, **_ONE_TOKEN, "max_completion_tokens": 1}, _OPENAI),
    RequestKind.RESPONSES: _Cap(
        {
            "stream": False,
            "max_output_tokens": 1,
            "ignore_eos": True,
            "store": False,
            "background": False,
        },
        _STOPS | {"stream_options"},
    ),
    # vLLM's schema for messages has neither min_tokens nor ignore_eos.
    RequestKind.MESSAGES: _Cap({"stream": False, "max_tokens": 1}, frozenset({"stop_sequences"})),
    RequestKind.GENERATE: _Cap(
        {"stream": False}, frozenset({"stream_options", "return_token_ids"}), _ONE_TOKEN
    ),
}

_NULL: Final = Raw(b"null")
_OFF: Final = frozenset({b"null", b"false"})


class _Message(msgspec.Struct):
    content: Raw = _NULL


class _Part(msgspec.Struct):
    type: str = ""


_messages: Final = msgspec.json.Decoder(list[_Message])
_parts: Final = msgspec.json.Decoder(list[_Part])


def add_member(body: Body, name: str, value: bytes) -> bytes:
    """Encode the body with one more member, after the others; `value` is encoded JSON."""
    return _append(body.data, name, value, b"," if body.members else b"")


def add_member_to_object(data: bytes, name: str, value: bytes) -> bytes:
    """The same for an encoded JSON object that is not empty."""
    return _append(data, name, value, b",")


def replace_members(
    members: Members, changes: Mapping[str, Any], drop: Collection[str] = ()
) -> bytes:
    """Encode the object with `changes` set, new keys last, and without the keys in `drop`."""
    remaining: dict[str, Any] = {k: v for k, v in members.items() if k not in drop}
    return msgspec.json.encode(remaining | dict(changes))


def cap_to_one_token(kind: RequestKind, body: Body, changes: dict[str, Any]) -> bytes:
    """Encode the body of a prefill leg: limited to one token, with `changes` set besides."""
    cap = _CAPS[kind]
    if not cap.sampling or SAMPLING_PARAMS not in body.members:
        return replace_members(body.members, cap.changes | changes, cap.drop)
    sampling = _cap_sampling(body.members[SAMPLING_PARAMS], cap.sampling)
    return replace_members(
        body.members, cap.changes | {SAMPLING_PARAMS: sampling} | changes, cap.drop
    )


def can_reuse_token_ids(body: Body) -> bool:
    """Whether the decode engine may take a chat's token ids instead of rendering its messages.

    True for text-only chats that do not ask for the rendered prompt. False as well for a chat that
    cannot be parsed: the engine refuses it, or renders it itself.
    """
    members = body.members
    if _is_on(members, "echo") or _is_on(members, "return_prompt_text"):
        return False
    try:
        messages = _messages.decode(members.get("messages", _NULL))
        return all(_is_text(message.content) for message in messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _append(data: bytes, name: str, value: bytes, comma: bytes) -> bytes:
    # Written into the encoded object, so that its other bytes stay as the client sent them.
    return b'%b%b"%b":%b}' % (data[: data.rindex(b"}")], comma, name.encode(), value)


def _cap_sampling(raw: Raw, changes: Mapping[str, Any]) -> Raw:
    """Cap the sampling parameters; a value that is no object is left for the engine to refuse."""
    try:
        members = decode_members(raw)
    except msgspec.ValidationError:
        return raw
    return Raw(replace_members(members, changes, _STOPS))


def _is_on(members: Members, name: str) -> bool:
    return name in members and bytes(members[name]) not in _OFF


def _is_text(content: Raw) -> bool:
    # Content is a string, null or a list of parts, and only parts can be media.
    if bytes(memoryview(content)[:1]) != b"[":
        return True
    return all(part.type == "text" for part in _parts.decode(content))
