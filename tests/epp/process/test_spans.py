"""Spans of decisions, received by an HTTP server, and the traceparent that is sent on."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem_contract import headers as wire
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.process.spans import DECIDE, OtlpTracer

from ...sidecar.observability.collector import GrpcCollector
from ..placement.test_picker import LONG, NOW, PickerSetup

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Collector:
    """An OTLP collector that records spans."""

    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    async def take(self, request: web.Request) -> web.Response:
        export = ExportTraceServiceRequest.FromString(await request.read())
        for resource in export.resource_spans:
            self.services |= {
                attribute.value.string_value
                for attribute in resource.resource.attributes
                if attribute.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response()


@asynccontextmanager
async def traced(setup: PickerSetup) -> AsyncIterator[Collector]:
    """Exports the spans of a picker; the collector has all of them after the block."""
    collector = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", collector.take)])
    async with TestServer(app) as server:
        tracer = OtlpTracer(str(server.make_url("/v1/traces")))
        setup.picker.tracer = tracer
        try:
            yield collector
        finally:
            await tracer.close()


def send(setup: PickerSetup, body: object, **headers: str) -> Mapping[str, str]:
    request = HttpRequest("POST", "/v1/completions", headers)
    placed = setup.picker.place(request, json.dumps(body).encode(), NOW)
    return dict(placed.mutation.set)


def attributes(span: Span) -> dict[str, object]:
    return {
        attribute.key: attribute.value.string_value or attribute.value.int_value
        for attribute in span.attributes
    }


async def test_a_decision_is_a_child_of_the_client_and_parent_of_the_sidecar() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    client_headers = {wire.TRACEPARENT: f"00-{TRACE}-{CALLER}-01", wire.REQUEST_ID: "r"}
    async with traced(setup) as collector:
        sent = send(setup, {"model": "m", "prompt": LONG}, **client_headers)
        new_trace_headers = send(setup, {"model": "m", "prompt": "hi"})
        send(setup, {}, **{wire.TRACEPARENT: f"00-{TRACE}-{CALLER}-00"})
    assert collector.services == {"tandem-epp"}
    split, other = collector.spans
    assert (split.name, split.trace_id.hex()) == (DECIDE, TRACE)
    assert split.parent_span_id.hex() == CALLER
    assert sent[wire.TRACEPARENT] == f"00-{TRACE}-{split.span_id.hex()}-01"
    assert split.start_time_unix_nano == int(NOW * 1e9) < split.end_time_unix_nano
    assert attributes(split) == {
        "tandem.request_id": "r",
        "tandem.reason": "worth_it",
        "tandem.routing_path": "prefill_then_decode",
        "tandem.prompt_tokens": 500,
        "tandem.cached_tokens": 0,
        "tandem.decode_backend": "d",
        "tandem.prefill_backend": "p",
        "gen_ai.request.model": "m",
    }
    assert other.parent_span_id == b""
    _, trace_id, span_id, flags = new_trace_headers[wire.TRACEPARENT].split("-")
    assert (trace_id, span_id) == (other.trace_id.hex(), other.span_id.hex())
    assert int(flags, 16) & 1, "sampled"


async def test_errors_are_exported_and_probes_only_in_a_clients_trace() -> None:
    setup = PickerSetup(d="decode")
    probe = HttpRequest("GET", "/v1/models", {})
    async with traced(setup) as collector:
        assert wire.TRACEPARENT not in dict(setup.picker.place(probe, b"", NOW).mutation.set)
        setup.down("d")
        with pytest.raises(NotPlaced):
            send(setup, {"model": "m", "prompt": "hi"})
    (span,) = collector.spans
    assert attributes(span)["http.response.status_code"] == 503
    assert (span.status.code, span.status.message) == (2, "no_backend")


async def test_requests_are_placed_while_the_collector_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    setup, before = PickerSetup(d="decode"), set(threading.enumerate())
    tracer = OtlpTracer("http://127.0.0.1:1/v1/traces")
    setup.picker.tracer = tracer
    assert wire.TRACEPARENT in send(setup, {"model": "m", "prompt": "hi"})
    async with asyncio.timeout(20):
        await tracer.close()
        # Their last retry would draw random numbers in the middle of another test.
        for thread in set(threading.enumerate()) - before:
            await asyncio.to_thread(thread.join)


async def test_spans_go_by_grpc_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    async with GrpcCollector() as collector:
        setup = PickerSetup(d="decode")
        tracer = OtlpTracer(collector.url)
        setup.picker.tracer = tracer
        send(setup, {"prompt": LONG})
        await tracer.close()
        assert [span.name for span in collector.spans] == [DECIDE]
        assert collector.resource["service.name"] == "tandem-epp"
