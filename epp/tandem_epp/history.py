"""The latest decisions and what came of them, for `tandem trace`. No prompt, no header.

decision = history.add(Decision(id, now))     on the way of every request: one append
history.find(id)                              when somebody asks: a walk over what is kept
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

from .backends.pods import Gauges, Pod

MAX_TEXT: Final = 256
"""Characters kept of a text that a client chose."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pod as it was known when it was chosen. Not the pod: that one may be gone, and its prefix
    index must not outlive it here."""

    name: str
    address: str
    in_flight: int
    gauges: Gauges | None


def candidates(pods: Sequence[Pod]) -> tuple[Candidate, ...]:
    """What is known of `pods` now."""
    return tuple(Candidate(p.name, p.address or "", p.in_flight, p.gauges) for p in pods)


@dataclass(slots=True)
class Decision:
    """One request's decision; `status`, `timing` and `ended` come later."""

    request_id: str
    decided: float
    """Unix seconds."""
    seconds: float = 0.0
    """What the decision took."""
    path: RoutingPath | None = None
    """None: refused, or answered by the EPP itself."""
    reason: str = ""
    model: str | None = None
    decode: tuple[Candidate, ...] = ()
    prefill: tuple[Candidate, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    status: int | None = None
    timing: Timing | None = None
    ended: float | None = None
    """Seconds after the decision."""
    _began: float = field(default_factory=perf_counter)

    def made(self) -> float:
        """The decision stands; the seconds it took."""
        self.seconds = perf_counter() - self._began
        # What a client chose is kept in no greater length than anybody would ask for.
        self.request_id = self.request_id[:MAX_TEXT]
        self.model = self.model[:MAX_TEXT] if self.model else None
        return self.seconds

    def refused(self, status: int, reason: str) -> None:
        """The EPP answered by itself."""
        self.status, self.reason = status, reason
        self.end()

    def end(self) -> None:
        """The request is over."""
        self.ended = perf_counter() - self._began

    def trace(self) -> DecisionTrace:
        """As it is told."""
        return DecisionTrace(
            request_id=self.request_id,
            decided=self.decided,
            decision_seconds=self.seconds,
            model=self.model or "",
            path=self.path,
            reason=self.reason,
            decode=tuple(map(_told, self.decode)),
            prefill=tuple(map(_told, self.prefill)),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            status=self.status,
            timing=self.timing,
            ended=self.ended,
        )


class History:
    """The latest decisions, oldest first."""

    def __init__(self, size: int) -> None:
        """`size`: how many are kept; 0 keeps none."""
        self._decisions: deque[Decision] = deque(maxlen=size)

    def add(self, decision: Decision) -> Decision:
        """Keep `decision`, and forget the oldest for it."""
        self._decisions.append(decision)
        return decision

    def find(self, request_id: str) -> list[DecisionTrace]:
        """The decisions for `request_id`, the newest last; at most MAX_SAME_ID of them."""
        kept = request_id[:MAX_TEXT]
        same = [each for each in self._decisions if each.request_id == kept]
        return [each.trace() for each in same[-MAX_SAME_ID:]]


def route(history: History) -> web.RouteDef:
    """`GET /requests/ID`: a list of DecisionTrace, empty with status 404 when none is known."""

    async def requests(request: web.Request) -> web.Response:
        found = history.find(request.match_info["id"])
        return web.Response(
            status=200 if found else 404,
            body=msgspec.json.encode(found),
            content_type="application/json",
        )

    return web.get(REQUESTS + "{id}", requests)


def _told(candidate: Candidate) -> CandidateTrace:
    gauges = candidate.gauges
    return CandidateTrace(
        candidate.name,
        candidate.address,
        candidate.in_flight,
        waiting=gauges.waiting if gauges else None,
        kv_usage=gauges.kv_usage if gauges else None,
    )
