"""Sends spans to an OpenTelemetry collector, on a thread of the SDK.

The sampled flag of the caller's `traceparent` decides whether a request is traced; without one,
OTEL_TRACES_SAMPLER does. At most QUEUE spans wait for the collector. More are dropped and counted,
so a slow or missing collector never delays requests.

Imported only where a collector is configured: OpenTelemetry takes 20 MB of memory per process.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Final

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

from tandem_contract.otlp_exporter import span_exporter

from .record import (
    Leg,
    Record,
    TraceContext,
    new_span_id,
    new_trace_id,
    parse_traceparent,
)
from .spans import OPERATIONS, REQUEST, Span, leg_spans, request_spans

QUEUE: Final = 2048
"""Spans that may wait for the collector, 1.5 KB each: those of some 400 requests."""
FLUSH_SECONDS: Final = 2.0
"""Seconds for sending the waiting spans when the process ends."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_EXPORTERS: Final = "opentelemetry.exporter"
"""The parent of the loggers of the SDK's exporters."""
_SCOPE: Final = InstrumentationScope("tandem_sidecar")
_OK: Final = Status()

log = logging.getLogger(__name__)


class OtlpTracer:
    """The observer's `Tracer`: decides which requests are traced, and queues their spans."""

    def __init__(self, url: str, pod_name: str, service_name: str = "tandem-sidecar") -> None:
        """`url`: the collector's; empty: OTEL_EXPORTER_OTLP_ENDPOINT and the like name it."""
        # The SDK logs every lost batch; `_CountingExporter` logs the first one.
        logging.getLogger(_EXPORTERS).setLevel(logging.CRITICAL)
        self._exporter = _CountingExporter(span_exporter(url, os.environ))
        self._processor = BatchSpanProcessor(self._exporter, max_queue_size=QUEUE)
        # The provider is used only to read sampler and resource from the environment.
        resource = _resource(pod_name, service_name)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._resource = provider.sampler, provider.resource
        self._queued = 0
        """Spans handed to the SDK so far."""
        self._not_queued = 0
        """Spans dropped because QUEUE spans were waiting."""

    @property
    def dropped(self) -> int:
        """Spans lost so far: the queue was full, or the collector did not accept them."""
        return self._not_queued + self._exporter.lost

    def on_request_start(self, record: Record) -> None:
        """Set `record.trace` if the request is to be traced."""
        parent = parse_traceparent(record.traceparent) if record.traceparent else None
        # Without a caller's trace, probes and model lists are not worth one of their own.
        if parent is None and record.kind not in OPERATIONS:
            return
        trace_id, parent_id, context = new_trace_id(), "", None
        if parent is not None:
            trace_id, parent_id = parent.trace_id, parent.span_id
            flags = _SAMPLED if parent.sampled else _NOT_SAMPLED
            remote = _span_context(trace_id, parent_id, remote=True, flags=flags)
            context = set_span_in_context(NonRecordingSpan(remote))
        result = self._sampler.should_sample(context, int(trace_id, 16), REQUEST, SpanKind.SERVER)
        if result.decision is Decision.RECORD_AND_SAMPLE:
            record.trace = TraceContext(trace_id, new_span_id(), parent_id)

    def on_request_end(self, record: Record) -> None:
        """Send the request's spans, except those of a release that still runs."""
        if record.trace is not None:
            self._send(record.trace, request_spans(record, record.trace))

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """Send the span of a release, if its request has already ended."""
        # Until its request has ended, a release is one of the spans that `on_request_end` sends.
        if record.trace is not None and record.ended is not None:
            self._send(record.trace, leg_spans(record, record.trace, leg))

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the waiting spans, for `seconds` at most, and stop the SDK's thread."""
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]  # it has no annotations
            # After a timeout the loop may be closed already.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(flushed.set)

        # A daemon thread: a collector that hangs must not keep the process alive.
        Thread(target=flush, daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                await flushed.wait()
        except TimeoutError:
            self._exporter.shutdown()  # else the SDK's thread retries for a minute

    def _send(self, trace: TraceContext, spans: Sequence[Span]) -> None:
        for span in spans:
            # The SDK drops spans of a full queue without counting them, so the limit is applied
            # here. `exported` is written by the SDK's thread; a stale value only drops earlier.
            if self._queued - self._exporter.exported >= QUEUE:
                self._not_queued += 1
                continue
            self._queued += 1
            self._processor.on_end(self._to_sdk_span(trace, span))

    def _to_sdk_span(self, trace: TraceContext, span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id:
            remote = span.kind is SpanKind.SERVER
            parent = _span_context(trace.trace_id, span.parent_id, remote=remote)
        return ReadableSpan(
            span.name,
            context=_span_context(trace.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=span.kind,
            status=_OK if span.error is None else Status(StatusCode.ERROR, span.error or None),
            start_time=int(span.started * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=_SCOPE,
        )


class _CountingExporter(SpanExporter):
    """Counts exported and lost spans; logs when the collector fails and when it works again.

    Its methods run on the SDK's thread.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.exported = 0
        """Spans taken out of the queue, sent or lost."""
        self.lost = 0
        """Spans that the collector did not accept."""
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        # Before the call, which blocks while the collector hangs: these spans have left the queue.
        self.exported += len(spans)
        result = self._exporter.export(spans)
        failing = result is not SpanExportResult.SUCCESS
        if failing:
            self.lost += len(spans)
            if not self._failing:
                log.warning("the OpenTelemetry collector accepts no spans: dropping them")
        elif self._failing:
            log.info("the OpenTelemetry collector accepts spans again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _resource(pod_name: str, service_name: str) -> Resource:
    """Service and pod that the spans come from; OTEL_* variables override these attributes."""
    attributes = {"service.name": service_name}
    if pod_name:
        attributes |= {"service.instance.id": pod_name, "k8s.pod.name": pod_name}
    return Resource.create().merge(Resource(attributes)).merge(OTELResourceDetector().detect())


def _span_context(
    trace_id: str, span_id: str, *, remote: bool = False, flags: TraceFlags = _SAMPLED
) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), remote, flags)
