"""Classifies an engine's answer to a leg, as an event of the hand-off and as a recorded result."""

from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from tandem_contract import headers
from tandem_contract.api_grammar import GRAMMARS, MAX_PREAMBLE, Meaning
from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import RequestKind
from tandem_contract.stream_start import StreamStart
from tandem_contract.transfer_params import ParamsUnusable
from tandem_http1.answers import Answer, NoAnswer
from tandem_http1.connection import Failure
from tandem_http1.messages import ResponseHead

from ..connectors.protocol import KvHold
from ..observability.record import Result
from ..resume.errors import AnswerDiffers, StreamBroken
from .events_actions import (
    Cause,
    DecodeAdmitted,
    DecodeErrored,
    DecodeEvent,
    DecodeLost,
    DecodeRefused,
    Event,
    PrefillAnswered,
    PrefillEvent,
    PrefillFailed,
    PrefillRejected,
    PrefillUnusable,
)

_RETRY_AFTER: Final = headers.RETRY_AFTER.encode()
_RESULTS: Final = {
    Failure.UNREACHABLE: Result.UNREACHABLE,
    Failure.REFUSED: Result.UNREACHABLE,
    Failure.STALE: Result.LOST,
    Failure.LOST: Result.LOST,
    Failure.MALFORMED: Result.ERROR,
}


def prefill_event(
    answer: Answer | NoAnswer, read_kv_hold: Callable[[bytes], KvHold], name: str, unix: float
) -> PrefillEvent:
    """The event that the answer of the prefill backend `name` causes.

    `read_kv_hold` reads the body of a 2xx answer; `unix` is the time of day, in seconds, for a
    Retry-After that is a date.
    """
    if isinstance(answer, NoAnswer):
        malformed = answer.failure is Failure.MALFORMED
        return PrefillFailed(
            Cause.ERROR if malformed else Cause.UNREACHABLE, f"prefill by {name}: {answer.detail}"
        )
    status = answer.head.status
    if status in (429, 503):
        wait = retry_after(answer.head, unix)
        return PrefillFailed(Cause.BUSY, f"prefill by {name}: busy ({status})", wait)
    if 400 <= status < 500:
        return PrefillRejected(f"prefill by {name}: refused ({status})")
    if not 200 <= status < 300:
        return PrefillFailed(Cause.ERROR, f"prefill by {name}: answered {status}")
    try:
        return PrefillAnswered(read_kv_hold(answer.body))
    except ParamsUnusable as err:
        return PrefillUnusable(f"prefill by {name}: {err}")


def decode_event(kind: RequestKind, status: int) -> DecodeEvent:
    """The event that the head of a decode engine's answer to a request of `kind` causes."""
    if status >= 500:
        return DecodeErrored(busy=status == 503)
    if status >= 400:
        # vLLM releases the KV for certain only when it refuses an unknown model. Its schema check
        # answers 400 or 422 before the request reaches the connector, and generate never releases.
        return DecodeRefused(kv_released=status == 404 and kind is not RequestKind.GENERATE)
    return DecodeAdmitted()


class AnswerStart:
    """The beginning of an answer, held back until it tells how the engine does.

    A stream begins with its first token: the events before it come even if the KV does not, or
    before the engine computes anything. Any other answer begins with its first bytes.
    """

    __slots__ = ("_computed", "_kind", "_precedes_computing", "_stream", "data", "is_error")

    def __init__(self, kind: RequestKind | None, head: ResponseHead) -> None:
        """`kind`: None for a request that generates nothing."""
        self.data = b""
        """All bytes so far."""
        self._computed: float | None = None
        """When the prompt was computed; None: no bytes have told that it is."""
        self.is_error = False
        """Whether it is a stream whose first event that means something is an error."""
        self._kind = kind
        self._stream: StreamStart | None = None
        if head.event_stream and head.value(b"content-encoding") in (b"", b"identity"):
            self._stream = StreamStart(kind)
            self._precedes_computing = kind is not None and GRAMMARS[kind].precedes_computing

    @property
    def error(self) -> tuple[int, str]:
        """HTTP status and message of the error that begins the stream."""
        return (500, "") if self._stream is None else self._stream.error()

    @property
    def is_computed(self) -> bool:
        """Whether the bytes tell that the prompt is computed, and its KV there."""
        return self._computed is not None

    def seconds_since(self, start: float) -> float | None:
        """From `start` until the prompt was computed. A stream may tell it before its first token,
        whose text a stop string or a parser of tools holds back. None: it is not told."""
        return None if self._computed is None else self._computed - start

    def take(self, data: bytes, now: float, *, last: bool) -> bool:
        """Add the newest bytes, which came `now`. Whether the answer has begun, so that they may be
        sent."""
        if self._stream is None:
            self.data, self._computed = data, now
            return True
        self.data = self.data + data if self.data else data
        meaning = self._stream.take(data)
        self.is_error = meaning is Meaning.ERROR
        # The stream of an API without a row is looked at once: what its tokens are is not known.
        may_wait = self._kind is not None and not last and len(self.data) < MAX_PREAMBLE
        has_begun = meaning is not Meaning.NOTHING or not may_wait
        if self._computed is None and (has_begun or not self._precedes_computing):
            self._computed = now
        return has_begun


def result_of(status: int) -> Result:
    """The result of a leg that got a complete answer."""
    if status < 400:
        return Result.ANSWERED
    if status in (429, 503):
        return Result.BUSY
    return Result.REJECTED if status < 500 else Result.ERROR


def result_of_break(err: StreamBroken) -> Result:
    """The result of a leg whose stream ended early, because of `err`."""
    return Result.DIFFERED if isinstance(err, AnswerDiffers) else Result.ERROR


def result_of_failure(failure: Failure) -> Result:
    """The result of a leg that got no complete answer."""
    return _RESULTS[failure]


def retry_after(head: ResponseHead, unix: float) -> float:
    """Seconds until the engine accepts requests again; 0 if it does not say.

    `unix` is the time of day, in seconds, for a Retry-After that is a date.
    """
    value = head.value(_RETRY_AFTER).decode("latin-1").strip()
    if value.isdecimal():
        # Nine digits at most: any longer wait is cut to `breaker.MAX_WAIT` anyway.
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value).replace(tzinfo=UTC)
        return max(0.0, date.timestamp() - unix)
    except (ValueError, OverflowError):
        return 0.0


FAILURES: Final = frozenset({DecodeErrored, DecodeLost, PrefillFailed, PrefillUnusable})
"""The events that are logged as the failure of a leg."""


def failure_detail(event: Event, engine: HostPort, answer: ResponseHead | None) -> str:
    """What a failed leg is logged as. `engine` decodes; `answer`: its answer's head, if it came."""
    match event:
        case DecodeErrored():
            status = answer.status if answer is not None else 0
            return f"decode by {engine}: answered with an error ({status})"
        case DecodeLost() | PrefillFailed() | PrefillUnusable():
            return event.detail
        case _:
            return ""
