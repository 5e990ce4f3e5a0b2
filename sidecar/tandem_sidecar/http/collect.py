"""A receiver that gathers a whole answer, for requests the sidecar makes on its own account."""

from collections.abc import Callable
from typing import Final

import msgspec

from .messages import ResponseHead
from .upstream import Failure

MAX_ANSWER: Final = 64 * 1024 * 1024
"""Bytes of an answer held in memory: a prefill's may list the prompt's token ids."""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, the chunked coding taken off."""

    head: ResponseHead
    body: bytes


class NoAnswer(msgspec.Struct, frozen=True, gc=False):
    """Why there is none."""

    failure: Failure
    detail: str


class Collector:
    """Calls `done` once with the answer, or with why there is none."""

    payload_only = True

    def __init__(self, done: Callable[[Answer | NoAnswer], None]) -> None:
        self._done: Callable[[Answer | NoAnswer], None] | None = done
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def head(self, head: ResponseHead) -> None:
        self._head = head

    def body(self, data: bytes, last: bool) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWER:
            self._parts.clear()
            self._report(NoAnswer(Failure.MALFORMED, f"an answer above {MAX_ANSWER} bytes"))
            return
        self._parts.append(data)
        if last and self._head is not None:
            self._report(Answer(self._head, b"".join(self._parts)))

    def failed(self, failure: Failure, detail: str) -> None:
        self._report(NoAnswer(failure, detail))

    def _report(self, answer: Answer | NoAnswer) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(answer)
