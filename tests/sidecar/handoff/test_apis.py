"""Each API, streamed by a scripted engine as vLLM streams it: nothing counts before a token."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tandem_contract import metrics
from tandem_contract.paths import RoutingPath
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.timing import parse_timing
from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import Script, Turn, hangs
from .test_timing import keys, planned

__all__ = ["keys"]

PATH = "X-Continuum-Routing-Path"
COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = RequestKind

Event = dict[str, Any]

PREAMBLES: dict[RequestKind, Sequence[Event]] = {
    COMPLETIONS: [],
    CHAT: [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}],
    GENERATE: [],
    RESPONSES: [
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.in_progress", "response": {"status": "in_progress", "output": []}},
    ],
    MESSAGES: [{"type": "message_start", "message": {"usage": {"input_tokens": 16}}}],
}
TOKENS: dict[RequestKind, Sequence[Event]] = {
    COMPLETIONS: [{"choices": [{"index": 0, "text": "hello"}]}],
    CHAT: [{"choices": [{"index": 0, "delta": {"content": "hello"}}]}],
    GENERATE: [{"choices": [{"index": 0, "token_ids": [7]}]}],
    RESPONSES: [
        {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
        {"type": "response.content_part.added", "part": {"text": ""}},
        {"type": "response.output_text.delta", "delta": "hello"},
    ],
    MESSAGES: [
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hello"}},
    ],
}
ENDS: dict[RequestKind, Event] = {
    RESPONSES: {"type": "response.completed", "response": {"usage": {"input_tokens": 16}}},
    MESSAGES: {"type": "message_stop"},
}
LATE = [kind for kind in RequestKind if PREAMBLES[kind]]
"""The APIs whose first event carries no token."""


def send(turn: Turn, event: Event) -> None:
    name = f"event: {event['type']}\n" if "type" in event else ""
    data = f"{name}data: {json.dumps(event)}\n\n".encode()
    turn.send(b"%x\r\n%b\r\n" % (len(data), data))


def kind_of(turn: Turn) -> RequestKind:
    return next(kind for kind, path in PATHS.items() if path == turn.request.target)


def begin(turn: Turn, *, tokens: bool) -> None:
    """Stream what precedes the first token, and this token if `tokens`."""
    turn.stream()
    kind = kind_of(turn)
    for event in (*PREAMBLES[kind], *(TOKENS[kind] if tokens else ())):
        send(turn, event)


async def complete(turn: Turn) -> None:
    begin(turn, tokens=True)
    if (end := ENDS.get(kind_of(turn))) is not None:
        send(turn, end)
    else:
        turn.event("[DONE]")
    turn.end()


async def fail_to_load(turn: Turn) -> None:
    """As vLLM 0.32 does: it has no error event for responses, and breaks the stream off."""
    begin(turn, tokens=False)
    kind = kind_of(turn)
    if kind is RESPONSES:
        await turn.writer.drain()
        turn.die()
        return
    error = {"message": "KV load failure", "type": "internal_error", "code": 500}
    send(turn, {"type": "error", "error": error} if kind is MESSAGES else {"error": error})
    if kind is not MESSAGES:
        turn.event("[DONE]")
    turn.end()


async def fail_in_band(turn: Turn) -> None:
    """The error events that the APIs define."""
    begin(turn, tokens=False)
    named = kind_of(turn) in (RESPONSES, MESSAGES)
    error = {"error": {"message": "KV load failure"}}
    send(turn, {"type": "error", **error} if named else error)
    turn.end()


def request(kind: RequestKind, **more: object) -> bytes:
    return json.dumps({"model": "m", "prompt": "Hi", "stream": True, **more}).encode()


@pytest.mark.parametrize("failure", [fail_to_load, fail_in_band])
@pytest.mark.parametrize("kind", RequestKind)
async def test_a_failed_kv_load_is_computed_by_the_decode_engine(
    harness: Harness, kind: RequestKind, failure: Script
) -> None:
    async def script(turn: Turn) -> None:
        await (failure if b"kv_transfer_params" in turn.request.body else complete)(turn)

    await harness.prefill()
    await harness.start(script)
    url = harness.url(PATHS[kind])
    async with harness.http.post(url, data=request(kind), headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
        body = await answer.text()
    assert "KV load failure" not in body
    assert body.count(json.dumps(TOKENS[kind][-1])) == 1
    assert [body.count(json.dumps(event)) for event in PREAMBLES[kind]] == [1] * len(
        PREAMBLES[kind]
    )
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1
    assert await harness.metric('tandem_sidecar_legs_total{phase="decode",result="error"}') == 1
    assert await harness.metric("tandem_sidecar_failed_loads_total") == 1


@pytest.mark.parametrize("kind", RequestKind)
async def test_an_engine_that_dies_while_it_loads_is_asked_once_more_and_then_a_502(
    harness: Harness, kind: RequestKind
) -> None:
    async def script(turn: Turn) -> None:
        begin(turn, tokens=False)
        await turn.writer.drain()
        harness.decode.close_port()
        turn.die()

    await harness.prefill()
    await harness.start(script)
    url = harness.url(PATHS[kind])
    async with harness.http.post(url, data=request(kind), headers=harness.candidates) as answer:
        assert answer.status == 502
        assert answer.content_type == "application/json"


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", RequestKind)
async def test_a_healthy_stream_is_passed_on_byte_for_byte_from_its_first_token(
    harness: Harness, kind: RequestKind, split: bool
) -> None:
    async def script(turn: Turn) -> None:
        begin(turn, tokens=True)
        await turn.writer.drain()
        await harness.go.wait()
        turn.event("[DONE]")
        turn.end()

    await harness.prefill()
    await harness.start(script)
    headers = harness.candidates if split else {}
    expected = [json.dumps(event) for event in (*PREAMBLES[kind], *TOKENS[kind])]
    async with harness.http.post(
        harness.url(PATHS[kind]), data=request(kind), headers=headers
    ) as answer:
        sent = [await answer.content.readuntil(b"\n\n") for _ in expected]
        harness.go.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"
    assert [event.rpartition(b"data: ")[2].decode().strip() for event in sent] == expected


DEATHS = ["dies", "hangs", "drain"]


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", RequestKind)
async def test_a_cut_stream_ends_in_the_error_of_its_api(
    harness: Harness, kind: RequestKind, split: bool, death: str
) -> None:
    async def script(turn: Turn) -> None:
        begin(turn, tokens=True)
        await turn.writer.drain()
        await harness.go.wait()
        if death == "dies":
            turn.die()
        await turn.gone.wait()

    await harness.prefill()
    await harness.start(script, silence_timeout=0.1, drain_timeout=0.1)
    if death == "hangs":
        harness.decode.health = hangs
    headers = harness.candidates if split else {}
    url = harness.url(PATHS[kind])
    async with harness.http.post(url, data=request(kind), headers=headers) as answer:
        for _ in (*PREAMBLES[kind], *TOKENS[kind]):
            await answer.content.readuntil(b"\n\n")
        harness.go.set()
        if death == "drain":
            harness.sidecar.lifecycle.drain()
        name, _, data = (await answer.content.read()).rpartition(b"data: ")
    body = json.loads(data)
    named = kind in (RESPONSES, MESSAGES)
    assert name == (b"event: error\n" if named else b"")
    assert body.get("type") == ("error" if named else None)
    assert body["error"]["message"]


@pytest.mark.parametrize("kind", LATE)
async def test_a_stuck_load_ends_by_its_timeout_although_events_have_come(
    harness: Harness, kind: RequestKind
) -> None:
    async def script(turn: Turn) -> None:
        if b"kv_transfer_params" not in turn.request.body:
            await complete(turn)
            return
        begin(turn, tokens=False)
        await turn.gone.wait()

    async def page(turn: Turn) -> None:
        loading = f'{metrics.ENGINE_KV_FETCH}{{stage="{metrics.KV_FETCH_LOADING}"}} 1.0'
        turn.answer(200, f"# TYPE\n{loading}\n".encode())

    await harness.prefill()
    await harness.start(script, kv_transfer_timeout=0.1)
    harness.decode.metrics = page
    url = harness.url(PATHS[kind])
    async with harness.http.post(url, data=request(kind), headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
    assert await harness.metric('tandem_sidecar_legs_total{phase="decode",result="deadline"}') == 1


async def send_request(harness: Harness, url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """The timing header of the answer."""
    async with harness.http.post(url, data=body, headers=headers) as answer:
        return answer.headers["x-tandem-timing"]


async def test_the_time_of_a_leg_of_responses_ends_with_the_first_token(
    harness: Harness, keys: PlanKeys
) -> None:
    """What the EPP learns a pod's rate from: vLLM sends the events before it computes anything."""
    kind = RequestKind.RESPONSES

    async def script(turn: Turn) -> None:
        begin(turn, tokens=False)
        await turn.writer.drain()
        before.set()
        await harness.go.wait()
        for event in TOKENS[kind]:
            send(turn, event)
        turn.end()

    before, loop = asyncio.Event(), asyncio.get_running_loop()
    await harness.start(script, keys=keys)
    headers = planned(harness, keys, RoutingPath.UNIFIED)
    url = harness.url(PATHS[kind])
    sent = asyncio.create_task(send_request(harness, url, request(kind), headers))
    await asyncio.wait_for(before.wait(), 10)
    computing = loop.time()
    # What takes longer than the events before the token did.
    for _ in range(50):
        await harness.metric("tandem_sidecar_in_flight")
    spent = loop.time() - computing
    harness.go.set()
    leg = parse_timing(await sent).leg
    assert leg is not None
    assert leg >= spent


@pytest.mark.parametrize("kind", RequestKind)
async def test_an_engine_that_fails_before_a_token_is_an_error_of_its_phase(
    harness: Harness, kind: RequestKind
) -> None:
    await harness.start(fail_in_band)
    async with harness.http.post(harness.url(PATHS[kind]), data=request(kind)) as answer:
        # Nothing has been sent, so the error has a status, which routers count.
        assert (answer.status, answer.headers[PATH]) == (500, "unified")
        assert "KV load failure" in await answer.text()
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') == 1
    assert await harness.metric('tandem_sidecar_legs_total{phase="decode",result="error"}') == 1


async def dies(turn: Turn) -> None:
    turn.die()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_the_sidecar_refuses_has_the_form_of_the_api(
    harness: Harness, path: str
) -> None:
    await harness.start(dies)
    requests: list[tuple[str, bytes, dict[str, str]]] = [
        (path, b'{"model"', {}),
        ("/v1/messages/batches", b"{}", {}),
        (path, b"{}", {"x-long": "y" * 70_000}),
        (path, b'{"model": "m"}', {}),
        (path, b"{}", {}),
    ]
    errors = []
    for target, body, headers in requests:
        if len(errors) == len(requests) - 1:
            harness.sidecar.lifecycle.drain()
        headers |= {"content-type": "application/json"}
        async with harness.http.post(harness.url(target), data=body, headers=headers) as answer:
            error = await answer.json()
            errors.append((answer.status, error["type"], error["error"]["type"]))
    assert errors == [
        (400, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
        (431, "error", "invalid_request_error"),
        (502, "error", "api_error"),
        (503, "error", "overloaded_error"),
    ]


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422])
async def test_a_4xx_of_the_prefill_leg_leaves_the_verdict_to_the_decode_engine(
    harness: Harness, status: int, fallback: bool
) -> None:
    async def refuses(turn: Turn) -> None:
        turn.answer(status, b'{"error": {"message": "one token is too few"}}')

    prefill = await harness.prefill(refuses)
    await harness.start(policy=Policy(fallback_to_unified=fallback))
    body = b'{"model": "m", "prompt": "Hi"}'
    async with harness.http.post(harness.url(), data=body, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
        assert await answer.json() == {"choices": [{"text": "hello"}]}
    assert harness.decode.requests[0].body == body
    assert len(prefill.requests) == 1
    assert await harness.metric('disaggregated_errors_total{phase="prefill"}') == 1
    rejected = 'tandem_sidecar_legs_total{phase="prefill",result="rejected"}'
    assert await harness.metric(rejected) == 1


async def test_a_request_that_both_engines_refuse_is_no_fallback(harness: Harness) -> None:
    async def refuses(turn: Turn) -> None:
        asked_for = turn.request.json["max_tokens"]
        turn.answer(400, b'{"error": {"message": "%d tokens are too many"}}' % asked_for)

    await harness.prefill(refuses)
    await harness.start(refuses)
    body = b'{"model": "m", "prompt": "Hi", "max_tokens": 200}'
    async with harness.http.post(harness.url(), data=body, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (400, "prefill_then_decode")
        assert (await answer.json())["error"]["message"] == "200 tokens are too many"
    assert await harness.metric("disaggregated_errors_total") == 0
    assert await harness.metric("disaggregated_fallback_total") == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_prefill_without_fallback_is_a_503(harness: Harness, status: int) -> None:
    async def busy(turn: Turn) -> None:
        turn.answer(status, b"{}", "retry-after: 7")

    await harness.prefill(busy)
    await harness.start(policy=Policy(fallback_to_unified=False))
    url, headers = harness.url("/v1/messages"), harness.candidates
    async with harness.http.post(url, data=b'{"model": "m"}', headers=headers) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "7")
        assert (await answer.json())["error"]["type"] == "overloaded_error"
    assert harness.decode.requests == []
