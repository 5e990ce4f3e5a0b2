"""What an engine's answer to a leg means to the hand-off."""

import re
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

from tandem_contract import headers
from tandem_contract.timing import UNKNOWN, Timing, parse_timing
from tandem_contract.transfer_params import ParamsUnusable

from ..bodies.kinds import Kind
from ..connectors.handover import Handover
from ..http.collect import Answer, NoAnswer
from ..http.messages import ResponseHead
from ..http.upstream import Failure
from ..observability.record import Result
from .events_actions import (
    Cause,
    DecodeAdmitted,
    DecodeErrored,
    DecodeEvent,
    DecodeRefused,
    PrefillAnswered,
    PrefillEvent,
    PrefillFailed,
    PrefillRejected,
    PrefillUnusable,
)

_TIMING: Final = headers.TIMING.encode()
_RETRY_AFTER: Final = headers.RETRY_AFTER.encode()
_ERROR_EVENT: Final = re.compile(rb"(?:[0-9a-fA-F]+\r\n)?\s*data: ?\{\s*\"error\"")
"""A stream's first chunk when the engine failed after it had sent 200."""
_RESULTS: Final = {
    Failure.UNREACHABLE: Result.UNREACHABLE,
    Failure.REFUSED: Result.UNREACHABLE,
    Failure.STALE: Result.LOST,
    Failure.LOST: Result.LOST,
    Failure.MALFORMED: Result.ERROR,
}


def prefill_event(
    answer: Answer | NoAnswer, handover: Callable[[bytes], Handover], name: str, unix: float
) -> PrefillEvent:
    """What the answer of the prefill backend `name` amounts to; `handover` reads its body.

    `unix` is the time of day, for a Retry-After that names one.
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
        return PrefillRejected()
    if not 200 <= status < 300:
        return PrefillFailed(Cause.ERROR, f"prefill by {name}: answered {status}")
    try:
        return PrefillAnswered(handover(answer.body))
    except ParamsUnusable as err:
        return PrefillUnusable(f"prefill by {name}: {err}")


def decode_event(kind: Kind, status: int) -> DecodeEvent:
    """What the head of a decode engine's answer to a request of `kind` amounts to."""
    if status >= 500:
        return DecodeErrored(busy=status == 503)
    if status >= 400:
        # Of its refusals, an engine is sure to release for an unknown model only: what its schema
        # rejects has not got as far, under 400 or 422, and generate has no such care at all.
        return DecodeRefused(released=status == 404 and kind is not Kind.GENERATE)
    return DecodeAdmitted()


def tells_of_failure(head: ResponseHead, data: bytes) -> bool:
    """Whether an answer's first bytes are a stream that begins with an error."""
    return head.event_stream and _ERROR_EVENT.match(data) is not None


def result_of(status: int) -> Result:
    """How a leg ended that brought a whole answer."""
    if status < 400:
        return Result.ANSWERED
    if status in (429, 503):
        return Result.BUSY
    return Result.REJECTED if status < 500 else Result.ERROR


def result_of_failure(failure: Failure) -> Result:
    """How a leg ended that brought none."""
    return _RESULTS[failure]


def retry_after(head: ResponseHead, unix: float) -> float:
    """Seconds an engine wants to be left alone, 0 without a wish; `unix` is the time of day."""
    value = head.value(_RETRY_AFTER).decode("latin-1").strip()
    if value.isdecimal():
        return float(value[:9])
    try:
        date = parsedate_to_datetime(value).replace(tzinfo=UTC)
        return max(0.0, date.timestamp() - unix)
    except (ValueError, OverflowError):
        return 0.0


def read_timing(head: ResponseHead) -> Timing:
    """What an engine said of its leg."""
    value = head.value(_TIMING)
    return parse_timing(value.decode("latin-1")) if value else UNKNOWN


def joined_timing(prefill: Timing | None, decode: Timing) -> Timing:
    """Both legs as one: who prefilled tells of the prompt, the puller of the transfer."""
    if prefill is None or prefill is decode:
        return decode
    return Timing(
        queue=prefill.queue,
        compute=prefill.compute,
        cached=prefill.cached,
        computed=prefill.computed,
        transfer=decode.transfer,
        bytes=decode.bytes,
    )
