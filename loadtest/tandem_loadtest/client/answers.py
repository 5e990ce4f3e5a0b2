"""What all APIs' answers have in common: their parts, and the errors inside them.

    AnswerError         the answer is not of the API that was asked, or
    └ ServerError       it reports an error

`openai`, `responses` and `messages` read each API's format.
"""

import re
from typing import Any, Final, Protocol, TypeVar

import msgspec

from ..calls import Answer, Usage
from .sse import StreamEvent

_BODY_START: Final = 16384
"""Bytes of an error response without a message that may become one."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class ServerMessage(msgspec.Struct, frozen=True):
    """A server's message about an error, as it came: it may repeat the request (see `reasons`)."""

    text: str
    kind: str = ""
    """The error's `type` and `code`, as far as these are names."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else self.text


class AnswerError(ValueError):
    """The answer reports an error, or is not of the API that was asked."""


class ServerError(AnswerError):
    """The answer reports an error; show its message only by `reasons.Redactor`."""

    def __init__(self, message: ServerMessage) -> None:
        super().__init__(str(message))
        self.message = message


class AnswerStream(Protocol):
    """Builds a streamed answer, event by event."""

    has_ended: bool
    """Whether the API's last event came."""
    token_events: int
    """Number of events with generated tokens."""

    def add(self, event: StreamEvent) -> None:
        """Add an event.

        Raises AnswerError for an error event, and for an event that is not of this API.
        """

    def add_all(self, data: bytes) -> None:
        """Add events as `EventParser.complete` returns them; like `add` for each."""

    def so_far(self) -> Answer:
        """The answer as received so far."""


class Parts:
    """Collects the parts of an answer."""

    __slots__ = (
        "finish_reason",
        "has_ids",
        "reasoning",
        "texts",
        "token_ids",
        "tool_calls",
        "usage",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[str] = []
        self.token_ids: list[int] = []
        self.has_ids = False
        self.finish_reason: str | None = None
        self.usage: Usage | None = None

    def answer(self) -> Answer:
        """The answer of the parts."""
        return Answer(
            "".join(self.texts),
            tuple(self.token_ids) if self.has_ids else None,
            self.finish_reason,
            self.usage,
            "".join(self.reasoning),
            "".join(self.tool_calls),
        )


class _Error(msgspec.Struct):
    """Where the APIs have the message of an error."""

    error: Any = None
    message: Any = None
    type: Any = None
    code: Any = None


T = TypeVar("T")
_error: Final = msgspec.json.Decoder(_Error)


def decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decode a part of an answer. Raises AnswerError, without any text of the answer."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        # Both name only types and positions. The cause could show the data, so it is cut off.
        reason = "not UTF-8" if isinstance(err, UnicodeDecodeError) else str(err)
        raise AnswerError(f"not an answer of this API: {reason}") from None


def server_message(body: bytes) -> ServerMessage:
    """An error response's message: the member `error`, or the body's start."""
    try:
        members = _error.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        members = _Error()
    if members.error is not None:
        return message_of(members.error)
    # The form of older vLLM has the error's members at the top of the object.
    if members.message is not None:
        return ServerMessage(str(members.message), _kind(members.type, members.code))
    return ServerMessage(body[:_BODY_START].decode(errors="replace").strip() or "an empty body")


def message_of(error: Any) -> ServerMessage:
    """The message of an `error` member."""
    if not isinstance(error, dict):
        return ServerMessage(str(error))
    kind = _kind(error.get("type"), error.get("code"))
    return ServerMessage(str(error.get("message", "no message")), kind)


def _kind(*names: Any) -> str:
    """Names of an error's kind; anything else than a name may be text of the request."""
    # The code of vLLM is the HTTP status, which its type says as well.
    kinds = [name for name in names if isinstance(name, str) and _NAME.fullmatch(name)]
    return " ".join(kind for kind in kinds if kind != "error")
