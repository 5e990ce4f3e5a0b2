"""Exports one span per decision, child of the client's, to an OpenTelemetry collector.

    client's traceparent ──► tandem.decide ──► traceparent of the sidecar's request

Imported only when tracing is configured. The client's traceparent says whether a request is
sampled, else OTEL_TRACES_SAMPLER. A thread of the SDK sends the spans, and drops those it cannot
send.
"""

import asyncio
import os
from contextlib import suppress
from threading import Thread
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem_contract import headers as wire
from tandem_contract.otlp_exporter import span_exporter

from ..placement.history import Decision

DECIDE: Final = "tandem.decide"
_FLUSH_SECONDS: Final = 2.0
"""Seconds to send the remaining spans at the end of the process."""
_propagator: Final = TraceContextTextMapPropagator()


class OtlpTracer:
    """The picker's `DecisionTracer`."""

    def __init__(self, url: str, service_name: str = "tandem-epp") -> None:
        """`url` is a collector's; empty: OpenTelemetry's environment variables name one."""
        default = Resource.create().merge(Resource({"service.name": service_name}))
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win over the default.
        resource = default.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = span_exporter(url, os.environ)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem_epp")

    def export(self, decision: Decision, traceparent: str | None) -> str:
        """Export a complete decision; returns the traceparent for the sidecar's spans."""
        parent = _propagator.extract({wire.TRACEPARENT: traceparent} if traceparent else {})
        began = int(decision.decided_at * 1e9)
        span = self._tracer.start_span(
            DECIDE, parent, SpanKind.SERVER, _attributes(decision), start_time=began
        )
        if decision.path is None and (decision.status or 0) >= 500:
            span.set_status(StatusCode.ERROR, decision.reason)
        span.end(began + int(decision.seconds * 1e9))
        # Also for a span that is not sampled: the sidecar has to follow the same sampling decision.
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(span))
        return carrier[wire.TRACEPARENT]

    async def close(self) -> None:
        """Send the remaining spans, for _FLUSH_SECONDS at most."""
        loop, flushed = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            # After a timeout the event loop may be closed already.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(flushed.set)

        # shutdown() blocks for as long as a collector hangs: a daemon thread does not delay the
        # end of the process.
        Thread(target=flush, daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await flushed.wait()


def _attributes(decision: Decision) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "tandem.request_id": decision.request_id,
        "tandem.reason": decision.reason,
        "tandem.prompt_tokens": decision.prompt_tokens,
        "tandem.cached_tokens": decision.cached_tokens,
    }
    if decision.model:
        attributes["gen_ai.request.model"] = decision.model
    if decision.path is not None:
        attributes["tandem.routing_path"] = decision.path.value
    if decision.status is not None:
        attributes["http.response.status_code"] = decision.status
    for phase, ranked in (("decode", decision.decode), ("prefill", decision.prefill)):
        if ranked:
            attributes[f"tandem.{phase}_backend"] = ranked[0].name
    return attributes
