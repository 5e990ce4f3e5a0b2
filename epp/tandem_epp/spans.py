"""One span for each decision, below the client's, to an OpenTelemetry collector over HTTP.

    client's traceparent ──► tandem.decide ──► traceparent of the sidecar's request

Imported only where spans are wanted. Whether a request is traced its client says, else
OTEL_TRACES_SAMPLER. A thread of the SDK's sends; spans that it cannot are dropped.
"""

import asyncio
from contextlib import suppress
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem_contract import headers as wire

from .history import Decision

DECIDE: Final = "tandem.decide"
_FLUSH_SECONDS: Final = 2.0
"""At the end of the process, for what waits."""
_propagator: Final = TraceContextTextMapPropagator()


class Tracer:
    """The picker's `Spans`; `url` empty: OpenTelemetry's environment names the collector."""

    def __init__(self, url: str) -> None:
        ours = Resource.create().merge(Resource({"service.name": "tandem-epp"}))
        resource = ours.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url or None)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem_epp")

    def decided(self, decision: Decision, traceparent: str | None) -> str:
        """Tell of a decision that stands; the traceparent of what follows from it."""
        parent = _propagator.extract({wire.TRACEPARENT: traceparent} if traceparent else {})
        began = int(decision.decided * 1e9)
        span = self._tracer.start_span(
            DECIDE, parent, SpanKind.SERVER, _attributes(decision), start_time=began
        )
        if decision.path is None and (decision.status or 0) >= 500:
            span.set_status(StatusCode.ERROR, decision.reason)
        span.end(began + int(decision.seconds * 1e9))
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(span))
        return carrier[wire.TRACEPARENT]

    async def close(self) -> None:
        """Send what waits, for _FLUSH_SECONDS at most."""
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            # The loop is closed where nobody waited for this.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(flushed.set)

        # A collector that hangs holds its thread up, not the process's end.
        Thread(target=flush, daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await flushed.wait()


def _attributes(decision: Decision) -> dict[str, str | int]:
    about: dict[str, str | int] = {
        "tandem.request_id": decision.request_id,
        "tandem.reason": decision.reason,
        "tandem.prompt_tokens": decision.prompt_tokens,
        "tandem.cached_tokens": decision.cached_tokens,
    }
    if decision.model:
        about["gen_ai.request.model"] = decision.model
    if decision.path is not None:
        about["tandem.routing_path"] = decision.path.value
    if decision.status is not None:
        about["http.response.status_code"] = decision.status
    for phase, ranked in (("decode", decision.decode), ("prefill", decision.prefill)):
        if ranked:
            about[f"tandem.{phase}_backend"] = ranked[0].name
    return about
