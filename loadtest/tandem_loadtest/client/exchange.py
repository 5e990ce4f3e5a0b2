"""One request on its way: its times, its answer as it arrives, and the times of its tokens."""

from collections.abc import Callable, Mapping
from typing import Final

from tandem_contract.request_kinds import RequestKind

from ..calls import Answer, Call
from . import messages, openai, responses
from .answers import AnswerError, AnswerStream, ServerError, ServerMessage, server_message
from .reasons import Redactor, texts_of
from .sse import EventParser

MAX_BODY: Final = 64 * 1024 * 1024
"""Largest answer that is not streamed, in bytes; of an error answer, what is read of it."""

STREAMS: Final[Mapping[RequestKind, Callable[[], AnswerStream]]] = {
    RequestKind.COMPLETIONS: openai.OpenAIStream,
    RequestKind.CHAT: openai.OpenAIStream,
    RequestKind.GENERATE: openai.OpenAIStream,
    RequestKind.RESPONSES: responses.ResponsesStream,
    RequestKind.MESSAGES: messages.MessagesStream,
}
_PARSERS: Final[Mapping[RequestKind, Callable[[bytes], Answer]]] = {
    RequestKind.COMPLETIONS: openai.parse_answer,
    RequestKind.CHAT: openai.parse_answer,
    RequestKind.GENERATE: openai.parse_answer,
    RequestKind.RESPONSES: responses.parse_answer,
    RequestKind.MESSAGES: messages.parse_answer,
}


class Exchange:
    """Takes the response to a call as it arrives (`http.Receiver`). Times as in `Result`."""

    __slots__ = (
        "_body",
        "_parser",
        "_redactor",
        "_size",
        "_stream",
        "call",
        "fields",
        "first_token",
        "gaps",
        "kind",
        "last_token",
        "started",
        "status",
    )

    def __init__(self, call: Call, started: float, redactor: Redactor) -> None:
        self._redactor = redactor
        self.call = call
        self.kind = call.endpoint
        self.started = started
        self._parser = EventParser()
        self._stream: AnswerStream | None = None
        self._body: list[bytes] = []
        self._size = 0
        self.status: int | None = None
        self.fields: Mapping[bytes, bytes] = {}
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.gaps: list[float] = []

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        """See `Receiver.head`."""
        self.status, self.fields = status, fields
        if status == 200 and self.call.stream and self._is_event_stream():
            self._stream = STREAMS[self.kind]()

    def data(self, data: bytes, now: float) -> None:
        """See `Receiver.data`; raises AnswerError or EventTooLarge."""
        stream = self._stream
        if stream is None:
            self._size += len(data)
            if self._size > MAX_BODY:
                raise AnswerError(f"the answer exceeds {MAX_BODY >> 20} MiB")
            self._body.append(data)
            return
        before = stream.token_events
        try:
            if events := self._parser.complete(data):
                stream.add_all(events)
        except ServerError as err:
            raise self._error(err.message) from None
        finally:
            # Also when an error follows tokens in the same read.
            if stream.token_events > before:
                self._take_time(now)

    def _take_time(self, now: float) -> None:
        """Note that tokens came; those that arrive together have the same time."""
        if self.last_token is None:
            self.first_token = now
        else:
            self.gaps.append(now - self.last_token)
        self.last_token = now

    def answer(self) -> Answer:
        """The answer, complete or as far as it came.

        Raises AnswerError when a whole body is not an answer of the API.
        """
        if self._stream is not None:
            return self._stream.so_far()
        if self.status != 200:
            return Answer()
        body = b"".join(self._body)
        if self.call.stream:
            # A server's error may have the status of its stream; another body is no stream.
            if b'"error"' in body:
                raise self._error(server_message(body))
            media_type = self.fields.get(b"content-type", b"").decode("latin-1")
            raise self._error(ServerMessage(f"the answer is {media_type}, not an event stream"))
        try:
            return _PARSERS[self.kind](body)
        except ServerError as err:
            raise self._error(err.message) from None

    def message(self) -> str:
        """The server's message in an answer whose status is an error."""
        return self._shown(server_message(b"".join(self._body)))

    def _error(self, message: ServerMessage) -> AnswerError:
        """The error to raise for a server's message, with what may be shown of it."""
        return AnswerError(self._shown(message))

    def _shown(self, message: ServerMessage) -> str:
        answer = Answer() if self._stream is None else self._stream.so_far()
        return self._redactor.shown(message, texts_of(self.call.prompt, answer))

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._stream is not None

    @property
    def has_last_event(self) -> bool:
        """Whether the last event of a stream came."""
        return self._stream is not None and self._stream.has_ended

    def _is_event_stream(self) -> bool:
        media_type = self.fields.get(b"content-type")
        return media_type is None or media_type.lower().startswith(b"text/event-stream")
