"""The latest decisions and their outcome, for `tandem trace`. Holds no prompt and no header.

decision = history.add(Decision(id, now))     for every request: one append
history.find(id)                              for `tandem trace`: a scan of all decisions kept
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import msgspec
from aiohttp import web

from tandem_contract.endpoints import REQUESTS
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import MAX_SAME_ID, CandidateTrace, DecisionTrace

from .backends.engine_page import Gauges
from .backends.pods import Pod

MAX_TEXT: Final = 256
"""Characters kept of a model name, which a client chose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod's address and load when it was chosen. A copy, because a reference to the Pod would
    keep the prefix indexes of a removed pod in memory."""

    name: str
    address: str
    in_flight: int
    gauges: Gauges | None


def candidates(pods: Sequence[Pod]) -> tuple[Candidate, ...]:
    """The present address and load of each of `pods`."""
    return tuple(Candidate(p.name, p.address or "", p.in_flight, p.gauges) for p in pods)


@dataclass(slots=True)
class Decision:
    """The decision for one request. `status`, `timing` and `ended` are filled in as the response
    passes and the stream ends."""

    request_id: str
    decided_at: float
    """Unix seconds."""
    seconds: float = 0.0
    """Duration of the decision."""
    path: RoutingPath | None = None
    """None when the EPP answered the request itself."""
    reason: str = ""
    model: str | None = None
    decode: tuple[Candidate, ...] = ()
    """The choice, then its alternates."""
    prefill: tuple[Candidate, ...] = ()
    """The choice, then the retries."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens believed to be cached on the decode pod."""
    status: int | None = None
    """HTTP status of the response."""
    timing: Timing | None = None
    """The times and token counts that the sidecar sent with the response headers."""
    ended: float | None = None
    """Seconds after the decision began at which the request ended."""
    # Durations use the monotonic clock; `decided_at` is wall-clock time for the reader.
    _began: float = field(default_factory=perf_counter)

    def complete(self) -> float:
        """Record the duration of the decision, now that it is complete; returns it in seconds."""
        self.seconds = perf_counter() - self._began
        # The history keeps thousands of these: a client must not choose their size.
        self.model = self.model[:MAX_TEXT] if self.model else None
        return self.seconds

    def record_local_reply(self, status: int, reason: str) -> None:
        """Record that the EPP answered the request itself."""
        self.status, self.reason = status, reason
        self.end()

    def end(self) -> None:
        """Record the end of the request."""
        self.ended = perf_counter() - self._began

    def trace(self) -> DecisionTrace:
        """The JSON form that `tandem trace` reads."""
        return DecisionTrace(
            request_id=self.request_id,
            decided=self.decided_at,
            decision_seconds=self.seconds,
            model=self.model or "",
            path=self.path,
            reason=self.reason,
            decode=tuple(map(_candidate_trace, self.decode)),
            prefill=tuple(map(_candidate_trace, self.prefill)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            status=self.status,
            timing=self.timing,
            ended=self.ended,
        )


class History:
    """The latest decisions, oldest first."""

    def __init__(self, size: int) -> None:
        """`size`: the number of decisions kept; 0 keeps none."""
        # A full deque drops its oldest element on append, without copying.
        self._decisions: deque[Decision] = deque(maxlen=size)

    def add(self, decision: Decision) -> Decision:
        """Keep `decision` and drop the oldest one if the history is full. The caller goes on
        filling in the same object, so a request under way can be looked up too."""
        self._decisions.append(decision)
        return decision

    def find(self, request_id: str) -> list[DecisionTrace]:
        """The decisions for `request_id`, newest last, at most MAX_SAME_ID of them: clients reuse
        ids."""
        # A linear scan: people ask rarely, and an index would cost every request.
        same_id = [decision for decision in self._decisions if decision.request_id == request_id]
        return [decision.trace() for decision in same_id[-MAX_SAME_ID:]]


def route(history: History) -> web.RouteDef:
    """`GET /requests/ID`: a list of DecisionTrace; an empty list with status 404 for an unknown
    id."""

    async def requests(request: web.Request) -> web.Response:
        traces = history.find(request.match_info["id"])
        return web.Response(
            status=200 if traces else 404,
            body=msgspec.json.encode(traces),
            content_type="application/json",
        )

    return web.get(REQUESTS + "{id}", requests)


def _candidate_trace(candidate: Candidate) -> CandidateTrace:
    gauges = candidate.gauges
    return CandidateTrace(
        candidate.name,
        candidate.address,
        candidate.in_flight,
        waiting=gauges.waiting if gauges else None,
        kv_usage=gauges.kv_usage if gauges else None,
    )
