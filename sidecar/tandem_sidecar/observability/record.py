"""What happened to one request: filled in by the data path, read by all that operators see.

    record = Record(request_id, kind, received)
    leg = record.leg(Phase.PREFILL, "prefill-0", engine_id, now)
    leg.end(Result.ANSWERED, now, status=200)

Times are the event loop's seconds; `received_unix` anchors them to the clock. No prompt text, no
secret: names, ids, figures.
"""

from enum import StrEnum
from typing import Final

import msgspec

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.timing import Timing

from .tracecontext import TraceContext

MAX_TEXT: Final = 256
"""Characters kept of a text that a peer or a client chose."""
PASSTHROUGH: Final = "passthrough"
"""The kind of a request that generates nothing."""


class Phase(StrEnum):
    """What a leg is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASE = "release"


class Result(StrEnum):
    """How a leg ended."""

    ANSWERED = "answered"
    """2xx, whole."""
    REJECTED = "rejected"
    """4xx: the client's fault."""
    BUSY = "busy"
    """429 or 503."""
    ERROR = "error"
    """Another 5xx, an error event at a stream's start, or no HTTP."""
    UNREACHABLE = "unreachable"
    """No connection."""
    LOST = "lost"
    """The connection ended before the answer did."""
    DEADLINE = "deadline"
    """No time left."""
    UNUSABLE = "unusable"
    """2xx that hands nothing over."""
    SILENT = "silent"
    """Neither an answer nor a sign of life."""
    HELD = "held"
    """Not asked: its breaker is open."""
    ABORTED = "aborted"
    """Ended here: the client left, a drain, or another leg's failure."""


class Leg(msgspec.Struct, eq=False, gc=False):
    """One request to an engine."""

    phase: Phase
    backend: str
    engine_id: str
    started: float
    first_byte: float | None = None
    ended: float | None = None
    result: Result | None = None
    status: int | None = None
    detail: str = ""
    timing: Timing | None = None
    """What the engine said of this leg."""
    traceparent: str = ""
    """What the engine gets in place of the client's; empty while nothing is traced."""

    def end(
        self, result: Result, now: float, *, status: int | None = None, detail: str = ""
    ) -> None:
        """Close the leg; the first end counts."""
        if self.result is None:
            self.result, self.ended, self.status, self.detail = result, now, status, detail


class Record(msgspec.Struct, eq=False, gc=False):
    """One request, from its last byte in to its last byte out."""

    request_id: str
    kind: str
    """A `Kind`, or `PASSTHROUGH`."""
    received: float
    received_unix: float
    method: str = "POST"
    target: str = ""
    """The path, without its query; `MAX_TEXT` of it."""
    traceparent: str = ""
    """As the client or the router sent it."""
    reason: str = ""
    """Why this routing path: the plan's word, or the rule's."""
    path: RoutingPath | None = None
    """The path taken; None for what is passed through."""
    outcome: str = ""
    """An `Outcome`; empty while it runs."""
    status: int | None = None
    """What the client was told."""
    first_byte: float | None = None
    ended: float | None = None
    errors: tuple[ErrorPhase, ...] = ()
    """Each failure's phase; one request may have several, and still be answered."""
    ignored: int = 0
    """Prefill addresses named without a signature and outside the allow-list."""
    legs: list[Leg] = []
    trace: TraceContext | None = None
    """Its span, where one will be made of it."""

    def leg(self, phase: Phase, backend: str, engine_id: str, now: float) -> Leg:
        """A new leg, begun now."""
        leg = Leg(phase, backend, engine_id, now)
        if self.trace is not None:
            leg.traceparent = self.trace.child()
        self.legs.append(leg)
        return leg
