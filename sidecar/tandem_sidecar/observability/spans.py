"""The spans that an ended request is told in. Pure; `tracer` sends them.

    tandem.request ─┬─ prefill
                    ├─ decode ── transfer     when the engine told how long it took
                    └─ release

Nothing is recorded while a request runs but its span ids, which engines are told.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .record import Leg, Phase, Record, Result
from .tracecontext import TraceContext, new_span_id, span_of

REQUEST: Final = "tandem.request"
TRANSFER: Final = "transfer"

OPERATIONS: Final = {
    "completions": "text_completion",
    "generate": "text_completion",
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
}
"""`gen_ai.operation.name` by kind; any other request generates nothing."""

_FINE: Final = frozenset({Result.ANSWERED, Result.ABORTED, Result.HELD})
_FAILED: Final = frozenset({"failed", "cut"})

Attributes = dict[str, str | int | float]


class Kind(Enum):
    """Which side of a call a span is."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids in hex, times in Unix seconds."""

    name: str
    kind: Kind
    span_id: str
    parent_id: str
    """Empty: it is its trace's first."""
    started: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    """What went wrong, where something did; may be empty."""


def request_spans(record: Record, trace: TraceContext) -> list[Span]:
    """All spans of an ended request; a release that is still out is told later."""
    legs = [span for leg in record.legs for span in leg_spans(record, trace, leg)]
    return [*legs, _request(record, trace)]


def leg_spans(record: Record, trace: TraceContext, leg: Leg) -> list[Span]:
    """The spans of one leg; none while it is out."""
    if leg.ended is None:
        return []
    started, ended = _unix(record, leg.started), _unix(record, leg.ended)
    span_id = span_of(leg.traceparent)
    failed = leg.result is not None and leg.result not in _FINE
    error = leg.detail if failed else None
    name, about = leg.phase.value, _leg_attributes(leg)
    span = Span(name, Kind.CLIENT, span_id, trace.span_id, started, ended, about, error)
    timing = leg.timing
    if leg.phase is not Phase.DECODE or timing is None or timing.transfer is None:
        return [span]
    # The engine tells how long it took, not when: it reads KV before all else.
    read = started + timing.transfer
    about = {} if timing.bytes is None else {"tandem.kv_bytes": timing.bytes}
    return [span, Span(TRANSFER, Kind.INTERNAL, new_span_id(), span_id, started, read, about)]


def _request(record: Record, trace: TraceContext) -> Span:
    about: Attributes = {
        "http.request.method": record.method,
        "url.path": record.target,
        "tandem.request_id": record.request_id,
        "tandem.outcome": record.outcome,
    }
    if record.status is not None:
        about["http.response.status_code"] = record.status
    if record.path is not None:
        about |= {"tandem.routing_path": record.path.value, "tandem.reason": record.reason}
    if record.first_byte is not None:
        about["tandem.first_byte_seconds"] = record.first_byte - record.received
    if operation := OPERATIONS.get(record.kind):
        about["gen_ai.operation.name"] = operation
    return Span(
        REQUEST,
        Kind.SERVER,
        trace.span_id,
        trace.parent_id,
        record.received_unix,
        _unix(record, record.received if record.ended is None else record.ended),
        about,
        "" if record.outcome in _FAILED else None,
    )


def _leg_attributes(leg: Leg) -> Attributes:
    about: Attributes = {"tandem.backend": leg.backend, "tandem.engine_id": leg.engine_id}
    if leg.result is not None:
        about["tandem.result"] = leg.result.value
        if leg.result not in _FINE:
            about["error.type"] = leg.result.value
    if leg.status is not None:
        about["http.response.status_code"] = leg.status
    if leg.first_byte is not None:
        about["tandem.first_byte_seconds"] = leg.first_byte - leg.started
    if (timing := leg.timing) is not None:
        if timing.queue is not None:
            about["tandem.queue_seconds"] = timing.queue
        if timing.compute is not None:
            about["tandem.compute_seconds"] = timing.compute
        if timing.cached is not None:
            about["gen_ai.usage.cache_read.input_tokens"] = timing.cached
        if timing.cached is not None and timing.computed is not None:
            about["gen_ai.usage.input_tokens"] = timing.cached + timing.computed
    return about


def _unix(record: Record, when: float) -> float:
    return record.received_unix + (when - record.received)
