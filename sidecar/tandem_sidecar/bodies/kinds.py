"""What generates, and how each kind is cut down to its prefill.

A prefill leg makes one token and nothing else: no stream, no stop that could end it before that
token (Mooncake hands KV off only when a request finished by length), nothing stored. What shapes
the prompt stays: tools, structured output, thinking.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Raw

from .edit import with_members
from .parse import Body, decode_members


class Kind(StrEnum):
    """Requests that generate, by their metric label; others are passed through."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"


PATHS: Final[Mapping[Kind, bytes]] = {
    Kind.COMPLETIONS: b"/v1/completions",
    Kind.CHAT: b"/v1/chat/completions",
    Kind.RESPONSES: b"/v1/responses",
    Kind.MESSAGES: b"/v1/messages",
    Kind.GENERATE: b"/inference/v1/generate",
}
_KINDS: Final = {path: kind for kind, path in PATHS.items()}

SAMPLING: Final = "sampling_params"
"""Where generate keeps what the other kinds say at the top."""


@dataclass(frozen=True, slots=True)
class _Cap:
    """Members set and left out in a prefill leg; `sampling` are those inside `SAMPLING`."""

    changes: dict[str, Any]
    drop: frozenset[str] = frozenset()
    sampling: dict[str, Any] = field(default_factory=dict)


_ONE_TOKEN: Final = {"max_tokens": 1, "min_tokens": 1, "ignore_eos": True}
_STOPS: Final = frozenset({"stop", "stop_token_ids"})
_OPENAI: Final = _STOPS | {"stream_options", "return_token_ids"}

_CAPS: Final[Mapping[Kind, _Cap]] = {
    Kind.COMPLETIONS: _Cap({"stream": False, **_ONE_TOKEN}, _OPENAI),
    Kind.CHAT: _Cap({"stream": False, **_ONE_TOKEN, "max_completion_tokens": 1}, _OPENAI),
    Kind.RESPONSES: _Cap(
        {
            "stream": False,
            "max_output_tokens": 1,
            "ignore_eos": True,
            "store": False,
            "background": False,
        },
        _STOPS | {"stream_options"},
    ),
    # vLLM's own schema has neither min_tokens nor ignore_eos here.
    Kind.MESSAGES: _Cap({"stream": False, "max_tokens": 1}, frozenset({"stop_sequences"})),
    Kind.GENERATE: _Cap(
        {"stream": False}, frozenset({"stream_options", "return_token_ids"}), _ONE_TOKEN
    ),
}


def kind_of(method: bytes, target: bytes) -> Kind | None:
    """Which generation a request line asks for; None for everything else."""
    return _KINDS.get(target.split(b"?", 1)[0]) if method == b"POST" else None


def capped(kind: Kind, body: Body, changes: dict[str, Any]) -> bytes:
    """The body cut down to one token, with `changes` set besides."""
    cap = _CAPS[kind]
    if not cap.sampling or SAMPLING not in body.members:
        return with_members(body.members, cap.changes | changes, cap.drop)
    sampling = _capped_sampling(body.members[SAMPLING], cap.sampling)
    return with_members(body.members, cap.changes | {SAMPLING: sampling} | changes, cap.drop)


def _capped_sampling(raw: Raw, changes: Mapping[str, Any]) -> Raw:
    """An engine refuses what is no object, and says so better."""
    try:
        members = decode_members(raw)
    except msgspec.ValidationError:
        return raw
    return Raw(with_members(members, changes, _STOPS))
