"""What differs between the generating APIs, one row for each kind of request: `GRAMMARS`.

    kind         events before the first token          error event          last event
    ───────────  ─────────────────────────────────────  ───────────────────  ─────────────────────
    completions  chunks without text                    data: {"error": …}   data: [DONE]
    chat         the role, empty deltas, bare usage     data: {"error": …}   data: [DONE]
    generate     chunks without token ids               data: {"error": …}   data: [DONE]
    responses    response.created, .queued,             event: error         response.completed,
                 .in_progress; empty items and parts    (`type`, `error`)    .incomplete, .failed
    messages     message_start, ping, an empty          event: error         message_stop
                 content_block_start                    (`type`, `error`)

vLLM sends `response.created` before it computes anything, and a chat's role or `message_start`
together with a failed KV load. So the first byte of a stream tells nothing: an answer begins with
its first token, and until then another engine may still serve the request. `stream_start` finds
this token, or the error that comes instead.

Who asks: sidecar and router (all of it), EPP (errors), load client (first token, last event).
A row also says where a usage is and which fields make a request depend on state of one engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import msgspec

from . import openai_errors
from .request_kinds import RequestKind, api_of_path
from .transfer_params import REQUEST_ID

MAX_PREAMBLE: Final = 1024 * 1024
"""Most bytes, before the first token, of a stream that is held back for it. `response.created` and
`response.in_progress` repeat the request's tools and instructions."""


class Meaning(Enum):
    """What an event of a stream means for the beginning of an answer."""

    NOTHING = auto()
    """Neither: the engine may not have computed anything yet."""
    TOKEN = auto()
    """It carries a token, or cannot be read."""
    END = auto()
    """The stream, or one of its choices, ends, perhaps without a token."""
    ERROR = auto()
    """The engine failed, after it had sent 200."""


@dataclass(frozen=True, slots=True)
class Cap:
    """How a request is cut to one token: members of its body to set and to remove."""

    changes: Mapping[str, Any]
    drop: frozenset[str] = frozenset()
    drop_typed: Mapping[str, str] = field(default_factory=dict)
    """Objects to remove if their `type` is this one."""
    sampling: "Cap | None" = None
    """The cap of the object of sampling parameters, where the API has one."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """One row of the table."""

    last_events: tuple[bytes, ...]
    """The types of the events that end a stream; `[DONE]` has no type, it is the event's data."""
    usage: tuple[tuple[str, ...], ...]
    """Where an answer, or an event of a stream, may have its usage: paths of members."""
    cap: Cap
    """How the prefill leg is limited to one token."""
    precedes_computing: bool = False
    """Whether the first events come before the engine computes; else they are its first output."""
    stored: frozenset[str] = frozenset()
    """Fields that read or keep an answer in one engine. The cap turns those off that keep it;
    `single_engine` never splits a request that reads one."""


# A stop condition could end the leg before its token, and Mooncake hands KV off only if a request
# ended by length.
_STOPS: Final = frozenset({"stop", "stop_token_ids"})
_ONE_TOKEN: Final = {"max_tokens": 1, "min_tokens": 1, "ignore_eos": True}
_OPENAI_DROP: Final = _STOPS | {"stream_options", "return_token_ids"}
_DONE: Final = (b"[DONE]",)
_AT_TOP: Final = (("usage",),)

GRAMMARS: Final[Mapping[RequestKind, Grammar]] = {
    RequestKind.COMPLETIONS: Grammar(
        last_events=_DONE,
        usage=_AT_TOP,
        cap=Cap({"stream": False, **_ONE_TOKEN}, _OPENAI_DROP),
    ),
    RequestKind.CHAT: Grammar(
        last_events=_DONE,
        usage=_AT_TOP,
        cap=Cap({"stream": False, **_ONE_TOKEN, "max_completion_tokens": 1}, _OPENAI_DROP),
    ),
    RequestKind.RESPONSES: Grammar(
        last_events=(b"response.completed", b"response.incomplete", b"response.failed"),
        usage=(("usage",), ("response", "usage")),
        cap=Cap(
            {
                "stream": False,
                "max_output_tokens": 1,
                "ignore_eos": True,
                "store": False,
                "background": False,
            },
            # Each attempt gets an id of its own: connectors match legs by it.
            _STOPS | {"stream_options", REQUEST_ID},
        ),
        precedes_computing=True,
        stored=frozenset({"previous_response_id", "background", "store"}),
    ),
    RequestKind.MESSAGES: Grammar(
        last_events=(b"message_stop",),
        usage=(("usage",), ("message", "usage")),
        # vLLM's schema for messages has neither min_tokens nor ignore_eos. It refuses a thinking
        # budget of max_tokens or more; without a budget it renders the same prompt.
        cap=Cap(
            {"stream": False, "max_tokens": 1},
            frozenset({"stop_sequences"}),
            drop_typed={"thinking": "enabled"},
        ),
    ),
    RequestKind.GENERATE: Grammar(
        last_events=_DONE,
        usage=_AT_TOP,
        cap=Cap(
            {"stream": False},
            frozenset({"stream_options", "return_token_ids"}),
            sampling=Cap(_ONE_TOKEN, _STOPS),
        ),
    ),
}

# Errors.

_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(path: str, status: int, message: str, *, param: str | None = None) -> bytes:
    """The body of an error with this HTTP `status` for a request of `path` (a query may follow).

    Anthropic's form for the messages API and what is below it, OpenAI's for every other path.
    """
    if api_of_path(path) is RequestKind.MESSAGES:
        return msgspec.json.encode(_anthropic_error(status, message))
    return openai_errors.error_body(status, message, param=param)


def error_event(kind: RequestKind | None, status: int, message: str) -> bytes:
    """The last event of a stream that ends early, in the form that clients of the API raise for.

    `kind`: None for an API without a row, which gets OpenAI's form. `status`: the HTTP status that
    the error would have had before the stream began.
    """
    if kind is RequestKind.MESSAGES:
        return _named_error(_anthropic_error(status, message))
    if kind is RequestKind.RESPONSES:
        return _named_error(_responses_error(status, message))
    return openai_errors.error_event(status, message)


def _anthropic_error(status: int, message: str) -> dict[str, Any]:
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _responses_error(status: int, message: str) -> dict[str, Any]:
    """OpenAI documents the members of the error beside the type, and sends them under `error`,
    for which alone its SDKs raise. The number is always 0: the sidecar does not count events."""
    members = {"code": str(status), "message": message, "param": None}
    error = {"type": openai_errors.type_of(status), **members}
    return {"type": "error", "sequence_number": 0, **members, "error": error}


def _named_error(body: dict[str, Any]) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"


class Choice(msgspec.Struct, gc=False):
    text: Any = None
    token_ids: Any = None
    logprobs: Any = None
    """A token that a parser keeps back may have these and an empty delta."""
    delta: dict[str, Any] = {}
    finish_reason: Any = None


class Chunk(msgspec.Struct, gc=False):
    """An event of completions, chat or generate."""

    choices: list[Choice] | None = None
    error: Any = None
    message: Any = None


class _Block(msgspec.Struct, gc=False):
    """A content block of messages, or an item of a response."""

    name: Any = None
    text: Any = None
    thinking: Any = None


class TypedEvent(msgspec.Struct, gc=False):
    """An event of responses or messages; the delta of the former is a text."""

    type: str = ""
    error: Any = None
    delta: Any = None
    content_block: _Block | None = None
    item: _Block | None = None


decode_chunk: Final = msgspec.json.Decoder(Chunk).decode
decode_typed_event: Final = msgspec.json.Decoder(TypedEvent).decode
