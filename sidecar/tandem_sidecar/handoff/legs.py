"""What an engine's answer to a leg means to the hand-off."""

import re
from collections.abc import Callable
from typing import Final, Protocol

from tandem_contract import headers
from tandem_contract.kvparams import ParamsUnusable
from tandem_contract.timing import Timing, parse_timing

from ..connectors.handover import Handover
from ..http.collect import Answer, NoAnswer
from ..http.messages import ResponseHead
from ..http.relay import EventChunks
from ..http.upstream import Failure
from .moves import (
    Cause,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
    PrefillUnusable,
)

PrefillEvent = PrefillAnswered | PrefillUnusable | PrefillRejected | PrefillFailed

_TIMING: Final = headers.TIMING.encode()
_ERROR_EVENT: Final = re.compile(rb"(?:[0-9a-fA-F]+\r\n)?\s*data: ?\{\s*\"error\"")
"""A stream's first chunk when the engine failed after it had sent 200."""


def prefill_event(
    answer: Answer | NoAnswer, handover: Callable[[bytes], Handover], name: str
) -> PrefillEvent:
    """What the answer of the prefill backend `name` amounts to; `handover` reads its body."""
    if isinstance(answer, NoAnswer):
        malformed = answer.failure is Failure.MALFORMED
        return PrefillFailed(
            Cause.ERROR if malformed else Cause.UNREACHABLE, f"prefill by {name}: {answer.detail}"
        )
    status = answer.head.status
    if status in (429, 503):
        return PrefillFailed(Cause.BUSY, f"prefill by {name}: busy ({status})")
    if 400 <= status < 500:
        return PrefillRejected()
    if not 200 <= status < 300:
        return PrefillFailed(Cause.ERROR, f"prefill by {name}: answered {status}")
    try:
        return PrefillAnswered(handover(answer.body))
    except ParamsUnusable as err:
        return PrefillUnusable(f"prefill by {name}: {err}")


def read_timing(head: ResponseHead) -> Timing:
    """What an engine said of its leg."""
    return parse_timing(head.value(_TIMING).decode("latin-1"))


def joined_timing(prefill: Timing | None, decode: Timing) -> Timing:
    """Both legs as one: who prefilled tells of the prompt, the puller of the transfer."""
    if prefill is None:
        return decode
    return Timing(
        queue=prefill.queue,
        compute=prefill.compute,
        cached=prefill.cached,
        computed=prefill.computed,
        transfer=decode.transfer,
        bytes=decode.bytes,
    )


class DecodeSide(Protocol):
    """Who hears of a decode leg."""

    def decode_head(self, head: ResponseHead) -> None:
        """The engine took the request, or failed at it (5xx)."""

    def decode_first(self, *, error: bool) -> None:
        """The first bytes to pass on are there; `error`: they tell of a failure."""

    def decode_body(self, data: bytes, *, last: bool) -> None:
        """Bytes of an answer that is being passed on."""

    def decode_lost(self, detail: str) -> None:
        """The answer broke off, or never came."""


class DecodeLeg:
    """Receives one decode leg's answer; `passing` is set once it is the client's."""

    def __init__(self, side: DecodeSide, *, payload_only: bool) -> None:
        self.payload_only = payload_only
        self.answer: ResponseHead | None = None
        self.passing = False
        self._side = side
        self._chunks: EventChunks | None = None
        self._dropped = False

    @property
    def between_chunks(self) -> bool:
        """Whether an error event may follow what was passed on."""
        return self._chunks is not None and self._chunks.between

    def drop(self) -> None:
        """Hand on nothing more, not even from the callback under way."""
        self._dropped = True

    def head(self, head: ResponseHead) -> None:
        self.answer = head
        self._chunks = EventChunks(head, wire=not self.payload_only)
        self._side.decode_head(head)

    def body(self, data: bytes, last: bool) -> None:
        if self._chunks is not None:
            data = self._chunks.take(data)
        if not data and not last:
            return
        if not self.passing and not self._dropped:
            self._side.decode_first(error=self._tells_of_failure(data))
        if not self._dropped:
            self._side.decode_body(data, last=last)

    def failed(self, failure: Failure, detail: str) -> None:
        self._side.decode_lost(detail)

    def _tells_of_failure(self, data: bytes) -> bool:
        stream = self.answer is not None and self.answer.event_stream
        return stream and _ERROR_EVENT.match(data) is not None
