"""Parses OpenAI response bodies into `Answer`, complete or chunk by chunk; no I/O, no clock.

Errors: `AnswerError`: the response is an error or an incomplete answer; the message says why.
"""

from typing import Any

import msgspec

from .calls import Answer, Usage
from .sse import ServerSentEvent

_DONE = "[DONE]"
_BROKEN = frozenset({"abort", "error"})


class AnswerError(ValueError):
    """The server reported an error, or its answer is incomplete."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    """A choice of either endpoint, complete or in a chunk."""

    index: int = 0
    text: str | None = None
    message: _Delta | None = None
    delta: _Delta | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        message = self.message or self.delta
        return self.text or (message.content if message else None) or ""


class _Body(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_decoder = msgspec.json.Decoder(_Body)


class AnswerBuilder:
    """Builds a streamed answer, event by event."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._has_ids = False
        self._finish_reason: str | None = None
        self._usage: Usage | None = None
        self._done = False

    def add(self, event: ServerSentEvent) -> bool:
        """Add one event. Returns whether it has tokens.

        Raises AnswerError when it is an error event or not a chunk of an answer.
        """
        if self._done:
            raise AnswerError(f"an event after {_DONE}")
        if event.data == _DONE:
            self._done = True
            return False
        if event.name == "error":
            raise AnswerError(error_message(event.data.encode()))
        body = _decode(event.data.encode())
        # With continuous usage, each chunk repeats it: the last one counts.
        self._usage = _usage(body) or self._usage
        choice = next((c for c in body.choices if c.index == 0), None)
        return choice is not None and self._take(choice)

    def _take(self, choice: _Choice) -> bool:
        text = choice.content()
        self._texts.append(text)
        if choice.token_ids is not None:
            self._has_ids = True
            self._token_ids += choice.token_ids
        self._finish_reason = choice.finish_reason or self._finish_reason
        # The first chunk of a chat has only the role: it is no token and sets no TTFT.
        return bool(text or choice.token_ids)

    def so_far(self) -> Answer:
        """The answer as received so far."""
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids) if self._has_ids else None,
            finish_reason=self._finish_reason,
            usage=self._usage,
        )

    def finish(self) -> None:
        """Check that the answer is complete; to be called at the end of the stream.

        Raises AnswerError when it is not.
        """
        if self._finish_reason is None:
            raise AnswerError("the stream ended without a finish_reason")
        if not self._done:
            raise AnswerError(f"the stream ended without {_DONE}")
        _check_finish(self._finish_reason)


def parse_answer(body: bytes) -> Answer:
    """Parse a response that is not streamed. Raises AnswerError when it is not an answer."""
    parsed = _decode(body)
    choice = next((c for c in parsed.choices if c.index == 0), None)
    if choice is None:
        raise AnswerError("the response has no choice")
    if choice.finish_reason is None:
        raise AnswerError("the response has no finish_reason")
    _check_finish(choice.finish_reason)
    return Answer(choice.content(), choice.token_ids, choice.finish_reason, _usage(parsed))


def error_message(body: bytes) -> str:
    """An error response's message in one line: OpenAI's `error.message`, or the body's start."""
    try:
        _refuse_error(_decoder.decode(body))
    except AnswerError as err:
        return str(err)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return _short(body.decode(errors="replace")) or "an empty body"


def _decode(data: bytes) -> _Body:
    try:
        body = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        shown = _short(data.decode(errors="replace"))
        raise AnswerError(f"not an OpenAI answer ({err}): {shown}") from err
    _refuse_error(body)
    return body


def _refuse_error(body: _Body) -> None:
    if body.error is not None:
        raise AnswerError(_error_text(body.error))
    # The form of older vLLM: the fields of the error at the top of the object.
    if body.object == "error":
        raise AnswerError(_error_text(body.message))


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return _short(str(message))


def _short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "…"


def _usage(body: _Body) -> Usage | None:
    usage = body.usage
    if usage is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    return Usage(usage.prompt_tokens, usage.completion_tokens, cached)


def _check_finish(reason: str) -> None:
    if reason in _BROKEN:
        raise AnswerError(f"the engine gave up: finish_reason {reason!r}")
