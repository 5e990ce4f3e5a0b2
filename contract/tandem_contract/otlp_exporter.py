"""The exporter of spans, by gRPC or HTTP. Imported only where a collector is configured: it loads
OpenTelemetry, and for gRPC grpcio as well.
"""

from collections.abc import Mapping

from opentelemetry.sdk.trace.export import SpanExporter

from .otlp import Protocol, protocol


def span_exporter(url: str, environ: Mapping[str, str]) -> SpanExporter:
    """An exporter to the collector at `url`; empty: OpenTelemetry's environment variables name
    one."""
    if protocol(url, environ) is Protocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter as GrpcSpanExporter,
        )

        return GrpcSpanExporter(endpoint=url or None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter as HttpSpanExporter,
    )

    return HttpSpanExporter(endpoint=url or None)
