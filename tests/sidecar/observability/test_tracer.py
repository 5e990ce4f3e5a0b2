"""Spans as a collector receives them from the SDK's thread."""

import logging
from collections.abc import AsyncIterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem_contract.timing import Timing
from tandem_sidecar.observability.record import Phase, Record, Result
from tandem_sidecar.observability.tracer import QUEUE, OtlpTracer

from .collector import Collector, GrpcCollector
from .records import end_record, handed_off, record

PATIENCE = 60.0
"""Seconds for sending spans; a busy machine may need long."""
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as new_collector:
        yield new_collector


def trace_record(tracer: OtlpTracer, request_record: Record) -> Record:
    tracer.on_request_start(request_record)
    for leg in request_record.legs:
        leg.traceparent = (
            request_record.trace.new_traceparent() if request_record.trace is not None else ""
        )
    tracer.on_request_end(request_record)
    return request_record


async def test_a_request_arrives_as_one_tree_below_its_callers_span(collector: Collector) -> None:
    tracer = OtlpTracer(collector.url, "decode-0")
    request_record = handed_off(timing=Timing(transfer=0.5))
    request_record.traceparent = f"00-{TRACE}-{CALLER}-01"
    trace_record(tracer, request_record)
    await tracer.close(PATIENCE)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"tandem.request", "prefill", "decode", "transfer"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    root = spans["tandem.request"]
    assert (root.parent_span_id.hex(), root.kind) == (CALLER, Span.SPAN_KIND_SERVER)
    assert spans["prefill"].parent_span_id == spans["decode"].parent_span_id == root.span_id
    assert spans["transfer"].parent_span_id == spans["decode"].span_id
    sent = {leg.phase.value: leg.traceparent for leg in request_record.legs}
    for name in ("prefill", "decode"):
        assert sent[name] == f"00-{TRACE}-{spans[name].span_id.hex()}-01"
    seconds = (spans["decode"].end_time_unix_nano - root.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(4.0)
    assert collector.resource["service.name"] == "tandem-sidecar"
    assert collector.resource["k8s.pod.name"] == "decode-0"
    assert tracer.dropped == 0


async def test_spans_go_by_grpc_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    async with GrpcCollector() as collector:
        tracer = OtlpTracer(collector.url, "decode-0")
        trace_record(tracer, handed_off())
        await tracer.close(PATIENCE)
        assert {span.name for span in collector.spans} == {"tandem.request", "prefill", "decode"}
        assert collector.resource["service.name"] == "tandem-sidecar"
        assert tracer.dropped == 0


async def test_without_a_callers_span_a_new_trace_begins(collector: Collector) -> None:
    tracer = OtlpTracer(collector.url, "")
    request_record = handed_off()
    request_record.traceparent = "not a traceparent"
    trace_record(tracer, request_record)
    await tracer.close(PATIENCE)
    assert [s.parent_span_id for s in collector.spans if s.name == "tandem.request"] == [b""]


async def test_a_request_that_the_caller_does_not_sample_is_not_traced(
    collector: Collector,
) -> None:
    tracer = OtlpTracer(collector.url, "")
    request_record = handed_off()
    request_record.traceparent = f"00-{TRACE}-{CALLER}-00"
    trace_record(tracer, request_record)
    assert (request_record.trace, request_record.legs[0].traceparent) == (None, "")
    await tracer.close(PATIENCE)
    assert collector.spans == []


async def test_a_passed_through_request_is_traced_only_in_its_callers_trace(
    collector: Collector,
) -> None:
    tracer = OtlpTracer(collector.url, "")
    assert trace_record(tracer, end_record(record(kind="passthrough"))).trace is None
    request_record = record(kind="passthrough")
    request_record.traceparent = f"00-{TRACE}-{CALLER}-01"
    trace_record(tracer, end_record(request_record))
    await tracer.close(PATIENCE)
    assert [span.name for span in collector.spans] == ["tandem.request"]


async def test_sampler_and_names_of_the_environment_apply(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = OtlpTracer("", "")
    trace_record(tracer, handed_off("r1"))
    sampled = handed_off("r2")
    sampled.traceparent = f"00-{TRACE}-{CALLER}-01"
    trace_record(tracer, sampled)
    await tracer.close(PATIENCE)
    assert collector.resource["service.name"] == "mine"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}


async def test_a_release_that_ends_after_its_request_is_sent(collector: Collector) -> None:
    tracer = OtlpTracer(collector.url, "")
    request_record = record()
    tracer.on_request_start(request_record)
    leg = request_record.leg(Phase.RELEASE, "d-0", "a", 100.0)
    tracer.on_request_end(end_record(request_record, "abandoned"))
    leg.end(Result.ANSWERED, 106.0, status=404)
    tracer.on_release_end(request_record, leg)
    await tracer.close(PATIENCE)
    spans = {span.name: span for span in collector.spans}
    assert spans["release"].parent_span_id == spans["tandem.request"].span_id


async def test_a_collector_that_refuses_causes_one_warning_and_is_counted(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = OtlpTracer(collector.url, "")
    collector.status = 400
    with caplog.at_level(logging.INFO):
        trace_record(tracer, handed_off())
        await tracer.close(PATIENCE)
    assert tracer.dropped == 3
    assert [r.levelname for r in caplog.records] == ["WARNING"]


async def test_a_collector_that_hangs_loses_spans_beyond_the_queue(collector: Collector) -> None:
    tracer = OtlpTracer(collector.url, "")
    collector.hangs = True
    for i in range(QUEUE):
        trace_record(tracer, handed_off(f"r{i}"))
    await collector.request_started.wait()
    assert 0 < tracer.dropped < 3 * QUEUE
    await tracer.close(0.1)
    assert collector.spans == []
