"""Sends spans to an OpenTelemetry collector over HTTP, on a thread of the SDK's.

Whether a request is traced its caller's `traceparent` says, else OTEL_TRACES_SAMPLER. At most QUEUE
spans wait for the collector; what does not fit is dropped and counted, so a collector that is slow
or gone costs requests nothing.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from . import tracecontext
from .record import Leg, Record
from .spans import OPERATIONS, REQUEST, Kind, Span, leg_spans, request_spans
from .tracecontext import TraceContext, new_span_id, new_trace_id

QUEUE: Final = 2048
"""Spans that wait: some 400 requests, 1.5 KB for each span."""
FLUSH_SECONDS: Final = 2.0
"""At the end of the process, for what waits."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_SCOPE: Final = InstrumentationScope("tandem_sidecar")
_OK: Final = Status()
_KINDS: Final = {kind: SpanKind[kind.name] for kind in Kind}

log = logging.getLogger(__name__)


class Tracer:
    """One process's; `url` empty: OpenTelemetry's environment names the collector."""

    def __init__(self, url: str, pod_name: str) -> None:
        # The SDK repeats itself with every batch that is lost; `_Sender` says it once.
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        self._sender = _Sender(OTLPSpanExporter(endpoint=url or None))
        self._processor = BatchSpanProcessor(self._sender, max_queue_size=QUEUE)
        # Of the provider nothing is used but what it reads from the environment.
        provider = TracerProvider(resource=_resource(pod_name), shutdown_on_exit=False)
        self._sampler, self._resource = provider.sampler, provider.resource
        self._queued = 0
        self._full = 0

    @property
    def dropped(self) -> int:
        """Spans that no collector has taken."""
        return self._full + self._sender.lost

    def began(self, record: Record) -> None:
        """Give the record its span's context, if it is to be traced."""
        parent = tracecontext.parse(record.traceparent) if record.traceparent else None
        # Probes and lists of models are worth a span only in somebody else's trace.
        if parent is None and record.kind not in OPERATIONS:
            return
        trace_id, parent_id, above = new_trace_id(), "", None
        if parent is not None:
            trace_id, parent_id = parent.trace_id, parent.span_id
            flags = _SAMPLED if parent.sampled else _NOT_SAMPLED
            remote = _context(trace_id, parent_id, remote=True, flags=flags)
            above = set_span_in_context(NonRecordingSpan(remote))
        result = self._sampler.should_sample(above, int(trace_id, 16), REQUEST, SpanKind.SERVER)
        if result.decision is Decision.RECORD_AND_SAMPLE:
            record.trace = TraceContext(trace_id, new_span_id(), parent_id)

    def ended(self, record: Record) -> None:
        """Send the request's spans off, but for a release that is still out."""
        if record.trace is not None:
            self._send(record.trace, request_spans(record, record.trace))

    def released(self, record: Record, leg: Leg) -> None:
        """Send off the span of a release that outlived its request."""
        if record.trace is not None and record.ended is not None:
            self._send(record.trace, leg_spans(record, record.trace, leg))

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what waits, for so many seconds at most."""
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]  # it has no annotations
            # The loop is closed where nobody waited for this.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(flushed.set)

        Thread(target=flush, daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                await flushed.wait()
        except TimeoutError:
            self._sender.shutdown()  # else its thread tries again, for a minute

    def _send(self, trace: TraceContext, spans: Sequence[Span]) -> None:
        for span in spans:
            if self._queued - self._sender.taken >= QUEUE:
                self._full += 1
                continue
            self._queued += 1
            self._processor.on_end(self._readable(trace, span))

    def _readable(self, trace: TraceContext, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id:
            remote = span.kind is Kind.SERVER
            parent = _context(trace.trace_id, span.parent_id, remote=remote)
        return ReadableSpan(
            span.name,
            context=_context(trace.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=_KINDS[span.kind],
            status=_OK if span.error is None else Status(StatusCode.ERROR, span.error or None),
            start_time=int(span.started * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=_SCOPE,
        )


class _Sender(SpanExporter):
    """Counts what the collector takes, on the SDK's thread, and says once when it takes nothing."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self.taken = 0
        """Spans out of the queue."""
        self.lost = 0
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing:
            self.lost += len(spans)
            if not self._failing:
                log.warning("the collector takes no spans: they are dropped until it does")
        elif self._failing:
            log.info("the collector takes spans again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it has no annotations


def _resource(pod_name: str) -> Resource:
    """Who speaks; what the environment says of it wins."""
    ours = {"service.name": "tandem-sidecar"}
    if pod_name:
        ours |= {"service.instance.id": pod_name, "k8s.pod.name": pod_name}
    return Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())


def _context(
    trace_id: str, span_id: str, *, remote: bool = False, flags: TraceFlags = _SAMPLED
) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, flags)
