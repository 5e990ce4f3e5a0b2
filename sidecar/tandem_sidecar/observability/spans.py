"""Makes the spans of a request from its record. Pure; `tracer` sends them.

    tandem.request ─┬─ prefill
                    ├─ decode ── transfer     if the engine reported how long the transfer took
                    └─ release

While a request runs, only its span ids exist, because engines get them in `traceparent`. The spans
are made when the request has ended. Imported by `tracer` alone: it needs OpenTelemetry.
"""

from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanKind

from tandem_contract.timing import Timing

from .record import (
    Leg,
    Outcome,
    Phase,
    Record,
    Result,
    TraceContext,
    new_span_id,
    span_id_of,
)

REQUEST: Final = "tandem.request"
TRANSFER: Final = "transfer"

OPERATIONS: Final = {
    "completions": "text_completion",
    "generate": "text_completion",
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
}
"""`gen_ai.operation.name` by request kind; a request of any other kind generates nothing."""

_NO_ERROR: Final = frozenset({Result.ANSWERED, Result.ABORTED, Result.CIRCUIT_OPEN})
"""Results of a leg that are no failure of its engine."""
_ERROR_OUTCOMES: Final = frozenset({Outcome.FAILED, Outcome.CUT})

Attributes = dict[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids in hex, times in Unix seconds."""

    name: str
    kind: SpanKind
    span_id: str
    parent_id: str
    """Empty: the first span of its trace."""
    started: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    error: str | None = None
    """Description of the failure, possibly empty; None: no failure."""


def request_spans(record: Record, trace: TraceContext) -> list[Span]:
    """All spans of an ended request, except for a release that still runs."""
    legs = [span for leg in record.legs for span in leg_spans(record, trace, leg)]
    return [*legs, _request_span(record, trace)]


def leg_spans(record: Record, trace: TraceContext, leg: Leg) -> list[Span]:
    """The spans of one leg: none while it runs, two if it reported a KV transfer."""
    if leg.ended is None:
        return []
    started, ended = _unix(record, leg.started), _unix(record, leg.ended)
    span_id = span_id_of(leg.traceparent)
    failed = leg.result is not None and leg.result not in _NO_ERROR
    error = leg.detail if failed else None
    name, attributes = leg.phase.value, _leg_attributes(leg)
    if leg.streamed:
        attributes["tandem.streamed"] = True
    span = Span(name, SpanKind.CLIENT, span_id, trace.span_id, started, ended, attributes, error)
    timing = leg.timing
    if leg.phase is not Phase.DECODE or timing is None or timing.transfer is None:
        return [span]
    # The engine reports the transfer's duration, not its start. It begins to load KV before it
    # computes anything, so the span is drawn at the start of the leg.
    loaded = started + timing.transfer
    size: Attributes = {} if timing.bytes is None else {"tandem.kv_bytes": timing.bytes}
    return [span, Span(TRANSFER, SpanKind.INTERNAL, new_span_id(), span_id, started, loaded, size)]


def _request_span(record: Record, trace: TraceContext) -> Span:
    attributes: Attributes = {
        "http.request.method": record.method,
        "url.path": record.target,
        "tandem.request_id": record.request_id,
        "tandem.outcome": record.outcome,
    }
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    if record.path is not None:
        attributes |= {"tandem.routing_path": record.path.value, "tandem.reason": record.reason}
    if record.first_byte is not None:
        attributes["tandem.first_byte_seconds"] = record.first_byte - record.received
    if record.moves:
        attributes["tandem.moves"] = len(record.moves)
    if operation := OPERATIONS.get(record.kind):
        attributes["gen_ai.operation.name"] = operation
    return Span(
        REQUEST,
        SpanKind.SERVER,
        trace.span_id,
        trace.parent_id,
        record.received_unix,
        _unix(record, record.received if record.ended is None else record.ended),
        attributes,
        "" if record.outcome in _ERROR_OUTCOMES else None,
    )


def _leg_attributes(leg: Leg) -> Attributes:
    attributes: Attributes = {"tandem.backend": leg.backend, "tandem.engine_id": leg.attempt_id}
    if leg.result is not None:
        attributes["tandem.result"] = leg.result.value
        if leg.result not in _NO_ERROR:
            attributes["error.type"] = leg.result.value
    if leg.status is not None:
        attributes["http.response.status_code"] = leg.status
    if leg.first_byte is not None:
        attributes["tandem.first_byte_seconds"] = leg.first_byte - leg.started
    if (timing := leg.timing) is not None:
        if timing.queue is not None:
            attributes["tandem.queue_seconds"] = timing.queue
        if timing.compute is not None:
            attributes["tandem.compute_seconds"] = timing.compute
        if timing.cached is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = timing.cached
        if (tokens := _prompt_tokens(timing)) is not None:
            attributes["gen_ai.usage.input_tokens"] = tokens
    return attributes


def _prompt_tokens(timing: Timing) -> int | None:
    """Tokens of the prompt; None: unknown."""
    # Tokens whose KV was transferred are neither cached nor computed.
    if timing.prompt is not None or timing.bytes is not None:
        return timing.prompt
    if timing.cached is None or timing.computed is None:
        return None
    return timing.cached + timing.computed


def _unix(record: Record, loop_time: float) -> float:
    return record.received_unix + (loop_time - record.received)
