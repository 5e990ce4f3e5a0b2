"""Metrics, history and spans of requests that a whole sidecar served."""

import asyncio

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tandem_contract.metrics import ENGINE_XFER_FAILED
from tandem_contract.trace import LegTrace, SidecarTrace, trace_path

from ..conftest import Harness
from ..fake_vllm import Answering, script
from ..peers import Turn
from ..wire import wire
from .collector import Collector

BODY = b'{"prompt": "do not tell"}'
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def find_traces(harness: Harness, request_id: str) -> tuple[int, bytes]:
    async with harness.http.get(harness.admin(trace_path(request_id))) as answer:
        return answer.status, await answer.read()


async def test_an_ended_request_is_found_with_all_its_legs(harness: Harness) -> None:
    await harness.prefill()
    await harness.start()
    headers = harness.candidates | {"x-request-id": "odd/id?"}
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.status == 200
    status, page = await find_traces(harness, "odd/id?")
    [trace] = msgspec.json.decode(page, type=list[SidecarTrace])
    assert (status, trace.outcome, trace.status, trace.reason) == (200, "answered", 200, "named")
    prefill, decode = trace.legs
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.result, decode.result) == ("answered", "answered")
    assert prefill.engine_id == decode.engine_id != "odd/id?"
    assert prefill.timing is not None
    assert prefill.timing.cached == 7
    assert 0 <= prefill.started <= (prefill.ended or 0) <= decode.started
    assert decode.started <= (decode.first_byte or 0) <= (trace.ended or 0)
    assert b"do not tell" not in page


@pytest.mark.parametrize("split", [True, False])
async def test_the_first_byte_of_a_leg_is_that_of_its_first_token(
    harness: Harness, split: bool
) -> None:
    async def answers(turn: Answering) -> None:
        turn.stream()
        turn.write(*turn.events.preamble)
        await harness.go.wait()
        turn.write(*turn.events.tokens, *turn.events.end)
        turn.end()

    async def find_leg() -> LegTrace:
        _, page = await find_traces(harness, "r1")
        [trace] = msgspec.json.decode(page, type=list[SidecarTrace])
        return trace.legs[-1]

    await harness.prefill()
    await harness.start(script(answers))
    headers = {"x-request-id": "r1"} | (harness.candidates if split else {})
    url, body = harness.url("/v1/responses"), b'{"input": "a", "stream": true}'
    request = asyncio.create_task(harness.http.post(url, data=body, headers=headers))
    await harness.decode.received(1)
    async with asyncio.timeout(10):
        while (leg := await find_leg()).status is None:
            await asyncio.sleep(0.01)
    assert leg.first_byte is None
    harness.go.set()
    async with await request as answer:
        await answer.read()
    assert (await find_leg()).first_byte is not None


async def test_an_unknown_request_id_is_answered_with_404(harness: Harness) -> None:
    await harness.start()
    assert await find_traces(harness, "r1") == (404, b"[]")


async def test_a_running_request_is_found_without_an_end(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        await harness.go.wait()
        turn.answer(200, b"{}")

    await harness.start(script)
    headers = {"x-request-id": "r1"}
    request = asyncio.create_task(post(harness, headers))
    await harness.decode.received(1)
    _, page = await find_traces(harness, "r1")
    [trace] = msgspec.json.decode(page, type=list[SidecarTrace])
    assert (trace.outcome, trace.ended, [leg.result for leg in trace.legs]) == ("", None, [None])
    harness.go.set()
    assert await request == 200


async def post(harness: Harness, headers: dict[str, str]) -> int:
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        return answer.status


async def test_engines_get_their_legs_span_as_parent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with Collector() as collector:
        prefill = await harness.prefill()
        await harness.start(otlp_endpoint=collector.url)
        headers = harness.candidates | {
            "traceparent": f"00-{TRACE}-{CALLER}-01",
            "tracestate": "a=b",
        }
        assert await post(harness, headers) == 200
        spans = await collector.received(4)
        await harness.stop()
    assert set(spans) == {"tandem.request", "prefill", "decode", "transfer"}
    assert spans["tandem.request"].parent_span_id.hex() == CALLER
    assert trace_headers(prefill.requests[0].headers) == (spans["prefill"].span_id.hex(), "a=b")
    assert trace_headers(harness.decode.requests[0].headers) == (
        spans["decode"].span_id.hex(),
        "a=b",
    )
    assert b"do not tell" not in b"".join(s.SerializeToString() for s in collector.spans)
    assert seconds(spans["transfer"]) == pytest.approx(0.125, abs=1e-6)


def trace_headers(headers: dict[str, str]) -> tuple[str, str]:
    version, trace, span, flags = headers["traceparent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    return span, headers["tracestate"]


def seconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@pytest.mark.parametrize("traced", [True, False])
async def test_an_unsampled_traceparent_is_forwarded_unchanged(
    harness: Harness, traced: bool
) -> None:
    async with Collector() as collector:
        await harness.start(otlp_endpoint=collector.url if traced else "")
        sent = f"00-{TRACE}-{CALLER}-{'00' if traced else '01'}"
        assert await post(harness, {"traceparent": sent}) == 200
        assert harness.decode.requests[0].headers["traceparent"] == sent
        await harness.stop()
    assert collector.spans == []


async def test_a_client_that_left_is_counted_with_its_release(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        await turn.gone.wait()

    await harness.prefill()
    await harness.start(script)
    lines = [f"{k}: {v}" for k, v in (harness.candidates | {"x-request-id": "r1"}).items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *lines)
        await harness.decode.received(1)
    await harness.decode.released.wait()
    released = 'tandem_sidecar_legs_total{phase="release",result="answered"}'
    async with asyncio.timeout(10):
        while await harness.metric(released) != 1:
            pass
    assert await harness.metric('tandem_sidecar_client_left_total{moment="handover"}') == 1
    _, page = await find_traces(harness, "r1")
    [trace] = msgspec.json.decode(page, type=list[SidecarTrace])
    assert [leg.phase for leg in trace.legs] == ["prefill", "decode", "release"]
    assert trace.outcome == "abandoned"
    assert await harness.metric("tandem_sidecar_draining") == 0


async def test_failures_counted_by_the_engine_are_added_at_a_scrape(harness: Harness) -> None:
    async def page(turn: Turn) -> None:
        turn.answer(200, f"{ENGINE_XFER_FAILED} 2\n".encode())

    await harness.start()
    errors = 'disaggregated_errors_total{phase="kv_transfer"}'
    assert await harness.metric(errors) == 0
    harness.decode.metrics = page
    async with asyncio.timeout(10):
        while await harness.metric(errors) != 2:
            pass


async def test_a_long_target_is_cut(harness: Harness) -> None:
    await harness.start()
    async with harness.http.post(
        harness.url("/v1/responses/" + "x" * 9999), headers={"x-request-id": "long"}, data=b"{}"
    ) as answer:
        await answer.read()
    _, page = await find_traces(harness, "long")
    [trace] = msgspec.json.decode(page, type=list[SidecarTrace])
    assert trace.target == "/v1/responses/" + "x" * 242


@pytest.mark.parametrize("spans", [True, False])
async def test_spans_can_be_turned_off_whatever_the_environment_names(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, spans: bool
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    await harness.start(spans=spans)
    async with harness.http.get(harness.admin("/metrics")) as answer:
        assert ("tandem_sidecar_spans_dropped" in await answer.text()) is spans
