"""A decision's span at a real collector's door, and the traceparent that goes on."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem_contract import headers as wire
from tandem_epp.ext_proc.messages import HttpRequest
from tandem_epp.ext_proc.stream import LocalReply
from tandem_epp.spans import DECIDE, OtlpTracer

from .test_picker import LONG, NOW, World

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Collector:
    """Takes spans, as their senders mean them."""

    spans: list[Span] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    async def take(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for resource in told.resource_spans:
            self.services |= {
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response()


@asynccontextmanager
async def traced(world: World) -> AsyncIterator[Collector]:
    """Spans are with the collector once this is left."""
    collector = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", collector.take)])
    async with TestServer(app) as server:
        tracer = OtlpTracer(str(server.make_url("/v1/traces")))
        world.picker.tracer = tracer
        try:
            yield collector
        finally:
            await tracer.close()


def asked(world: World, body: object, **headers: str) -> Mapping[str, str]:
    request = HttpRequest("POST", "/v1/completions", headers)
    placed = world.picker.place(request, json.dumps(body).encode(), NOW)
    return dict(placed.mutation.set)


def attributes(span: Span) -> dict[str, object]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


async def test_the_decision_is_the_callers_child_and_what_follows_its() -> None:
    world = World(d="decode", p="prefill")
    given = {wire.TRACEPARENT: f"00-{TRACE}-{CALLER}-01", wire.REQUEST_ID: "r"}
    async with traced(world) as collector:
        sent = asked(world, {"model": "m", "prompt": LONG}, **given)
        begun = asked(world, {"model": "m", "prompt": "hi"})
        asked(world, {}, **{wire.TRACEPARENT: f"00-{TRACE}-{CALLER}-00"})
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
    _, trace_id, span_id, flags = begun[wire.TRACEPARENT].split("-")
    assert (trace_id, span_id) == (other.trace_id.hex(), other.span_id.hex())
    assert int(flags, 16) & 1, "sampled"


async def test_a_refusal_is_told_and_a_probe_only_in_somebody_elses_trace() -> None:
    world = World(d="decode")
    probe = HttpRequest("GET", "/v1/models", {})
    async with traced(world) as collector:
        assert wire.TRACEPARENT not in dict(world.picker.place(probe, b"", NOW).mutation.set)
        world.down("d")
        with pytest.raises(LocalReply):
            asked(world, {"model": "m", "prompt": "hi"})
    (span,) = collector.spans
    assert attributes(span)["http.response.status_code"] == 503
    assert (span.status.code, span.status.message) == (2, "no_backend")


async def test_a_collector_that_is_gone_costs_no_request_anything() -> None:
    world = World(d="decode")
    tracer = OtlpTracer("http://127.0.0.1:1/v1/traces")
    world.picker.tracer = tracer
    assert wire.TRACEPARENT in asked(world, {"model": "m", "prompt": "hi"})
    async with asyncio.timeout(20):
        await tracer.close()
