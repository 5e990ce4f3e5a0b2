"""What a response, or its absence, says about the pods of a request. Pure.

The decode pod, from the response's headers; the first line that holds:

Envoy answered itself: connection refused or timed out        -> unreachable
Envoy answered itself: the pod closed the connection          -> reset
Envoy answered itself: no response in time                    -> timeout
Envoy answered itself: any other reason                       -> unknown, not the pod's fault
429, or 503 from the pod: it drains or its queue is full      -> busy
503, and the gateway does not tell who answered               -> unreachable
504                                                           -> timeout
any other 5xx                                                 -> error
everything below 500                                          -> answered: 4xx is the client's fault

Without response headers the client left: `abandoned` below. After them the pod may stall: `ended`
below. Or the answer may break off, which Envoy's access log tells: `server.ext_proc.access_log`.
It also tells of stalls at pods whose metrics do not show them.

The prefill pods, where the plan named some: see `prefill_outcomes`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from tandem_contract.paths import RoutingPath
from tandem_contract.stalls import STALL_SECONDS

_VIA_UPSTREAM: Final = "via_upstream"
"""Envoy's response code details for a response of the backend."""
_RESET: Final = "upstream_reset_before_response_started"
_UNCONNECTED: Final = ("connection_failure", "connection_timeout", "connect_error")
_TIMEOUTS: Final = (
    "upstream_response_timeout",
    "upstream_per_try_timeout",
    "upstream_per_try_idle_timeout",
    "response_timeout",
    "stream_idle_timeout",
)


class Outcome(StrEnum):
    """What happened to a request at one pod; the label `outcome` of a metric."""

    ANSWERED = "answered"
    """The pod answered: 2xx, 3xx or 4xx."""
    ERROR = "error"
    """The pod answered with 5xx, except 503 and 504."""
    UNREACHABLE = "unreachable"
    """The pod accepted no connection."""
    RESET = "reset"
    """The pod closed the connection before it answered."""
    BROKEN = "broken"
    """The connection ended in the middle of the answer, which counts as answered, too."""
    TIMEOUT = "timeout"
    """No answer in time: 504, of Envoy or of the pod."""
    STALLED = "stalled"
    """The request ended after STALL_SECONDS in which the pod answered no request and generated no
    token, although it had one to compute; or Envoy ended it, for it had sent nothing for longer."""
    HANDOFF = "handoff"
    """The sidecar got no usable KV from this prefill pod."""
    BUSY = "busy"
    """The pod asked for no more requests: 429 or 503. It works, so this is no failure."""
    UNKNOWN = "unknown"
    """Nothing was learned about the pod: the client left, or Envoy refused the request itself."""

    @property
    def is_failure(self) -> bool:
        """Whether it counts in the pod's failure rate."""
        return self in _FAILURES

    @property
    def may_be_requests(self) -> bool:
        """Whether a working pod may fail so because of the request itself."""
        return self in (Outcome.ERROR, Outcome.TIMEOUT, Outcome.HANDOFF)

    @property
    def accepts_nothing(self) -> bool:
        """Whether the pod probably takes no request now: it is avoided until a scrape succeeds."""
        return self in (Outcome.UNREACHABLE, Outcome.RESET)


_FAILURES: Final = frozenset(
    {
        Outcome.ERROR,
        Outcome.UNREACHABLE,
        Outcome.RESET,
        Outcome.BROKEN,
        Outcome.TIMEOUT,
        Outcome.STALLED,
        Outcome.HANDOFF,
    }
)


def decode_outcome(status: int, details: str | None, *, is_sidecar: bool) -> Outcome:
    """The outcome at the pod that Envoy sent the request to.

    `details` are Envoy's response code details, None where the gateway does not tell; `is_sidecar`:
    the response has a sidecar's headers.
    """
    if details is not None and details != _VIA_UPSTREAM and status >= 400:
        return _local_reply_outcome(details, status)
    if status == 503 and details is None and not is_sidecar:
        return Outcome.UNREACHABLE
    if status in (429, 503):
        return Outcome.BUSY
    if status == 502 and details is None and not is_sidecar:
        return Outcome.RESET
    if status == 504:
        return Outcome.TIMEOUT
    return Outcome.ERROR if status >= 500 else Outcome.ANSWERED


def _local_reply_outcome(details: str, status: int) -> Outcome:
    if details.startswith(_RESET):
        unconnected = any(reason in details for reason in _UNCONNECTED)
        # "overflow" is Envoy's own limit of requests.
        own_limit = "{overflow" in details
        if own_limit:
            return Outcome.UNKNOWN
        return Outcome.UNREACHABLE if unconnected else Outcome.RESET
    # A client that does not finish its request gets 408.
    is_timeout = status == 504 and details.startswith(_TIMEOUTS)
    return Outcome.TIMEOUT if is_timeout else Outcome.UNKNOWN


def prefill_outcomes(
    candidates: Sequence[str],
    path: str | None,
    prefill: str | None,
    status: int,
    *,
    has_failed: bool,
) -> Sequence[Outcome]:
    """The outcome at each prefill candidate of a split plan, in order; UNKNOWN where the sidecar's
    headers tell nothing.

    `candidates` are the names of the candidates as the sidecar would write them in `prefill`, the
    header that names the one which ran the prefill, or was asked last. `has_failed`: whether the
    response is the sidecar's error, because no prefill succeeded.

    - path `prefill_then_decode`: the named candidate answered or `has_failed`, and those before it
      failed.
    - path `fallback`: the first candidate failed. Later ones may not have been asked.
    - any other path, or 429 or 503: the plan was not followed, or not to its end.
    """
    outcomes = [Outcome.UNKNOWN] * len(candidates)
    if status in (429, 503) or not candidates:
        return outcomes
    if path == RoutingPath.FALLBACK:
        outcomes[0] = Outcome.HANDOFF
    elif path == RoutingPath.PREFILL_THEN_DECODE and prefill in candidates:
        named = candidates.index(prefill)
        outcomes[:named] = [Outcome.HANDOFF] * named
        outcomes[named] = Outcome.HANDOFF if has_failed else Outcome.ANSWERED
    return outcomes


def abandoned(silent: float) -> Outcome:
    """The outcome of a request whose client left before response headers, when the pod had shown no
    sign of work for `silent` seconds since the request was placed."""
    # A pod that answers others, or generates tokens, works: then the client was impatient.
    return Outcome.STALLED if silent >= STALL_SECONDS else Outcome.UNKNOWN


def ended(silent: float, *, has_work: bool) -> Outcome:
    """The outcome of a request that ended after its answer had begun, complete or not.

    `silent`: seconds, until the pod's last scrape, without a sign of work; `has_work`: whether this
    scrape shows requests that run or wait.
    """
    # Without work the answer is complete, and it is the client that reads it slowly.
    return Outcome.STALLED if has_work and silent >= STALL_SECONDS else Outcome.ANSWERED


def ended_unproved(silent: float, *, has_work: bool, has_generated: bool | None) -> Outcome:
    """The same of a request whose headers did not show that the answer had begun.

    `has_generated`: whether a scrape shows that the pod generated tokens since the request was
    placed; None: it was not scraped since then.
    """
    if has_generated is False:
        # Gauges tell nothing here: those of a hung engine stay as they were.
        return abandoned(silent)
    return ended(silent, has_work=has_work)
