"""What was measured of one scheduled request (`Record`), and how it ended (`Outcome`).

Times are seconds after the start of the run, on a clock that all worker processes share.
"""

from enum import StrEnum
from typing import Final

import msgspec


class Outcome(StrEnum):
    """How a scheduled request ended. Each request has exactly one outcome.

    When several would fit, the first in this order counts: it is the earliest cause.
    """

    UNSENT = "unsent"
    """Never sent: `--max-in-flight` was reached, an earlier turn of its conversation failed, or the
    run was stopped before its time. Also a request that the load generator itself cut off while it
    was in flight, because the run was stopped: the server lost nothing. Also a request that a
    worker process had not reported when it died, whether it was sent or not."""
    SHED = "shed"
    """HTTP 429 or 503: the server refused it to protect itself."""
    ERROR_STATUS = "error-status"
    """Any other HTTP status than 200."""
    IN_BAND_ERROR = "in-band-error"
    """An error inside an answer of status 200, or an answer that is not of the API asked."""
    TIMEOUT = "timeout"
    """The answer was not complete within `--timeout`."""
    CONNECTION_LOST = "connection-lost"
    """No connection, or it closed before the end of the HTTP response."""
    TRUNCATED = "truncated"
    """A complete HTTP response of status 200 without finish reason, the usage that was asked for,
    or the API's last event."""
    WRONG = "wrong"
    """Another answer than the reference's, which repeats itself."""
    DIFFERS = "differs"
    """Another answer than the reference's, which does not repeat itself under load either. It may
    be right: it is complete, and no loss."""
    OK = "ok"


COMPLETE: Final = frozenset({Outcome.OK, Outcome.DIFFERS})
"""Outcomes with a complete answer, of which latencies and rates are; all others are losses."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One scheduled request. Times are None for what did not happen."""

    index: int
    """Position in the schedule, from 0."""
    intended: float
    """When it should have been sent; never moved. In closed loop, and from the second turn of a
    conversation on: the end of the previous answer plus the think time."""
    outcome: Outcome
    error: str = ""
    """Why the outcome is not `ok`, in one line; never text of a prompt or an answer."""
    status: int | None = None
    """HTTP status."""
    started: float | None = None
    """When the load generator began to send it; later than `intended` only if it was late."""
    sent: float | None = None
    """When its first byte was written to a connected socket; of a request that was sent again, to
    the first one."""
    first_token: float | None = None
    """When the first generated token arrived (content, reasoning or tool call); None unless
    streamed."""
    last_token: float | None = None
    """When the last generated token arrived; None unless streamed."""
    ended: float | None = None
    """When the answer was complete, or failed."""
    gaps: tuple[float, ...] = ()
    """Seconds between successive reads with tokens, in order: their number is below that of tokens
    when several tokens arrive together."""
    prompt_tokens: int | None = None
    """By the server's usage, like the next two."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server took from a prefix cache; None: it does not say."""
    model: str = ""
    """Model name that was sent; differs between requests in a mix of LoRA adapters."""
    path: str = ""
    """Routing path from the response header `x-continuum-routing-path`; empty without it."""
    prefill_backend: str = ""
    """Name from the response header; empty without it."""
    decode_backend: str = ""
    """Name from the response header; empty without it."""
    session: int = 0
    """Conversation that the request belongs to."""
    turn: int = 0
    """Position in its conversation, from 0."""
    resent: int = 0
    """How often it was sent again, because the server had closed the kept-alive connection before
    the request came."""
