import pytest
from opentelemetry.trace import SpanKind

from tandem_contract.timing import Timing
from tandem_sidecar.observability.record import Phase, Result, TraceContext, span_id_of
from tandem_sidecar.observability.spans import leg_spans, request_spans

from .records import UNIX, end_record, handed_off, record

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1111111111111111")


def test_a_hand_off_is_a_tree_of_spans() -> None:
    request_record = handed_off(timing=Timing(transfer=0.5, bytes=4096))
    for leg in request_record.legs:
        leg.traceparent = TRACE.new_traceparent()
    spans = {span.name: span for span in request_spans(request_record, TRACE)}
    root, prefill, decode, transfer = (
        spans[name] for name in ("tandem.request", "prefill", "decode", "transfer")
    )
    assert (root.span_id, root.parent_id, root.kind) == (
        TRACE.span_id,
        TRACE.parent_id,
        SpanKind.SERVER,
    )
    assert {prefill.parent_id, decode.parent_id} == {root.span_id}
    assert [span_id_of(leg.traceparent) for leg in request_record.legs] == [
        prefill.span_id,
        decode.span_id,
    ]
    assert transfer.parent_id == decode.span_id
    times = [(s.started - UNIX, s.ended - UNIX) for s in (root, prefill, decode, transfer)]
    assert times == [(0, 5), (1, 2), (2, 4), (2, 2.5)]
    assert transfer.attributes == {"tandem.kv_bytes": 4096}
    assert [s.error for s in spans.values()] == [None] * 4


def test_attributes_of_spans() -> None:
    request_record = handed_off()
    for leg in request_record.legs:
        leg.traceparent = TRACE.new_traceparent()
    prefill, decode, root = request_spans(request_record, TRACE)
    assert root.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "tandem.request_id": "r1",
        "tandem.outcome": "answered",
        "tandem.routing_path": "prefill_then_decode",
        "tandem.reason": "worth_it",
        "tandem.first_byte_seconds": 3.0,
    }
    assert prefill.attributes == {
        "tandem.backend": "p-0",
        "tandem.engine_id": "r1-a",
        "tandem.result": "answered",
        "tandem.queue_seconds": 0.25,
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": 64,
        "gen_ai.usage.cache_read.input_tokens": 16,
    }
    assert decode.attributes["tandem.first_byte_seconds"] == 1.0


@pytest.mark.parametrize(
    ("timing", "prompt"),
    [
        (Timing(cached=16, computed=48), 64),
        (Timing(cached=16, computed=1, bytes=4096, prompt=64), 64),
        (Timing(cached=16, computed=1, bytes=4096), None),
        (Timing(prompt=64), 64),
        (Timing(cached=16), None),
    ],
)
def test_tokens_whose_kv_was_transferred_are_input_tokens(
    timing: Timing, prompt: int | None
) -> None:
    request_record = handed_off(timing=timing)
    for leg in request_record.legs:
        leg.traceparent = TRACE.new_traceparent()
    spans = {span.name: span for span in request_spans(request_record, TRACE)}
    decode = spans["decode"]
    assert decode.attributes.get("gen_ai.usage.input_tokens") == prompt


def test_a_failed_leg_is_an_error_and_an_aborted_one_is_not() -> None:
    request_record = record()
    request_record.trace = TRACE
    failed = request_record.leg(Phase.PREFILL, "p-0", "a", 100.0)
    failed.end(Result.ERROR, 101.0, status=500, detail="prefill by p-0: answered 500")
    aborted = request_record.leg(Phase.DECODE, "d-0", "b", 101.0)
    aborted.end(Result.ABORTED, 102.0)
    end_record(request_record, "cut")
    spans = {span.name: span for span in request_spans(request_record, TRACE)}
    assert spans["prefill"].error == "prefill by p-0: answered 500"
    assert spans["prefill"].attributes["error.type"] == "error"
    assert spans["decode"].error is None
    assert spans["tandem.request"].error is not None


def test_a_leg_that_still_runs_has_no_span_yet() -> None:
    request_record = record()
    request_record.trace = TRACE
    leg = request_record.leg(Phase.RELEASE, "d-0", "a", 100.0)
    end_record(request_record, "abandoned")
    assert [span.name for span in request_spans(request_record, TRACE)] == ["tandem.request"]
    leg.end(Result.ANSWERED, 101.0, status=404)
    assert [span.name for span in leg_spans(request_record, TRACE, leg)] == ["release"]
