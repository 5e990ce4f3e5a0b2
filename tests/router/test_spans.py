"""Spans of a request, as a real OTLP collector receives them: of the decision and of each leg."""

import asyncio

import pytest

from tandem_contract.headers import TRACEPARENT
from tandem_sidecar.settings import Settings

from ..sidecar.observability.collector import Collector, GrpcCollector
from .conftest import LOOPBACK, Harness

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("kind", [Collector, GrpcCollector])
async def test_a_hand_off_is_one_tree_below_the_clients_span(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: type[Collector]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    if kind is GrpcCollector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    prefill, decode = await harness.prefill("p"), await harness.decode("d")
    async with kind() as collector:
        flags = Settings(listen=LOOPBACK, admin=LOOPBACK, otlp_endpoint=collector.url)
        await harness.start(settings=flags)
        response, _ = await harness.ask(headers={TRACEPARENT: f"00-{TRACE}-{CALLER}-01"})
        assert response.status == 200
        async with asyncio.timeout(60):
            spans = await collector.received(5)
    assert set(spans) == {"tandem.decide", "tandem.request", "prefill", "decode", "transfer"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    decide, request = spans["tandem.decide"], spans["tandem.request"]
    assert decide.parent_span_id.hex() == CALLER
    assert request.parent_span_id == decide.span_id
    assert spans["prefill"].parent_span_id == spans["decode"].parent_span_id == request.span_id
    # Each engine's own spans join below its leg.
    for engine, leg in ((prefill, "prefill"), (decode, "decode")):
        sent = engine.requests[0].headers[TRACEPARENT]
        assert sent == f"00-{TRACE}-{spans[leg].span_id.hex()}-01"
    assert collector.resource["service.name"] == "tandem-router"
