"""The client against real servers: whole answers measured, everything else an error."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from tandem_contract import headers
from tandem_contract.openai_errors import error_body, error_event
from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Answer, Call, Message, Result, Usage
from tandem_loadtest.client import Client, Progress, Timed, converse, run_open_loop
from tandem_loadtest.conversations import Script, Step

from .servers import DONE, WHOLE, Gate, Handler, answering, chunk, serving, sse, streaming

STREAM = Call("once", max_tokens=2)
PLAIN = Call("once", max_tokens=2, stream=False)
GOOD = (chunk("a", 1), chunk("b", 2, "length"))


async def sent(handler: Handler, call: Call, **options: Any) -> Result:
    async with serving(handler) as url, Client(url, "tiny", **options) as client:
        return await client.send(call)


async def test_a_stream_is_read_and_measured() -> None:
    usage = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    result = await sent(streaming(*GOOD, usage, DONE), STREAM)
    assert result.ok
    assert result.status == 200
    assert result.answer == Answer("ab", (1, 2), "length", Usage(3, 2))
    assert result.ttft is not None
    assert len(result.itls) == 1
    assert 0 < result.ttft <= result.ttft + sum(result.itls) <= result.total


async def test_an_answer_without_streaming_is_read() -> None:
    result = await sent(answering(WHOLE), PLAIN)
    assert result.ok
    assert result.answer == Answer("ab", (1, 2), "length", Usage(3, 2))
    assert result.ttft is None
    assert result.itls == ()


async def test_events_cut_by_the_network_are_joined() -> None:
    whole = b"".join([*GOOD, DONE])
    result = await sent(streaming(*(whole[i : i + 7] for i in range(0, len(whole), 7))), STREAM)
    assert result.answer.text == "ab"
    assert result.ok


@pytest.mark.parametrize("call", [STREAM, PLAIN])
async def test_the_routing_headers_are_read(call: Call) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        named = {
            "X-Continuum-Routing-Path": "prefill_then_decode",
            headers.PREFILL_BACKEND: "p-0",
            headers.DECODE_BACKEND: "d-1",
        }
        if not (await request.json()).get("stream"):
            return web.json_response(WHOLE, headers=named)
        return await streaming(*GOOD, DONE, **named)(request)

    result = await sent(handler, call)
    assert result.routing_path is RoutingPath.PREFILL_THEN_DECODE
    assert (result.prefill_backend, result.decode_backend) == ("p-0", "d-1")


async def test_an_unknown_routing_path_is_none() -> None:
    result = await sent(streaming(*GOOD, DONE, **{headers.ROUTING_PATH: "shortcut"}), STREAM)
    assert result.routing_path is None


CHAT = Call((Message("system", "s"), Message("user", "u")), max_tokens=4, stream=False)


@pytest.mark.parametrize(
    ("call", "path", "fields"),
    [
        (STREAM, "completions", {"prompt": "once", "stream": True,
                                 "stream_options": {"include_usage": True}}),
        (PLAIN, "completions", {"prompt": "once"}),
        (Call((5, 6), 2, stream=False, ignore_eos=True), "completions",
         {"prompt": [5, 6], "ignore_eos": True}),
        (CHAT, "chat/completions", {"max_tokens": 4, "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_posted_body_and_headers(
    call: Call, path: str, fields: dict[str, Any], suffix: str
) -> None:
    requests: list[tuple[str, Any, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append((request.path, await request.json(), request.headers[headers.REQUEST_ID]))
        return web.json_response(WHOLE)

    async with serving(handler) as url, Client(url + suffix, "tiny") as client:
        await client.send(call, request_id="r-1")
    always = {"model": "tiny", "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    assert requests == [(f"/v1/{path}", {**always, **fields}, "r-1")]


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (streaming(*GOOD, error_event(502, "the decode engine died"), DONE), "decode engine died"),
        (streaming(b"event: error\ndata: overloaded\n\n", DONE), "overloaded"),
        (streaming(*GOOD), "without [DONE]"),
        (streaming(GOOD[0], DONE), "without a finish_reason"),
        (streaming(*GOOD, b"data: [DONE]"), "without [DONE]"),
        (streaming(), "without a finish_reason"),
        (streaming(GOOD[0], abort=True), "ClientPayloadError"),
        (streaming(*GOOD, DONE, abort=True), "ClientPayloadError"),
        (streaming(b"data: \xff\n\n"), "not UTF-8"),
        (answering(WHOLE), "without a finish_reason"),
    ],
)
async def test_a_broken_stream_is_never_a_success(handler: Handler, message: str) -> None:
    result = await sent(handler, STREAM)
    assert not result.ok
    assert message in str(result.error)


async def test_the_part_before_a_broken_stream_is_kept() -> None:
    result = await sent(streaming(GOOD[0], error_event(502, "gone")), STREAM)
    assert (result.answer.text, result.answer.token_ids, result.error) == ("a", (1,), "gone")
    assert result.ttft is not None


@pytest.mark.parametrize("call", [STREAM, PLAIN])
@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_an_error_status_is_the_results_error(call: Call, status: int) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = error_body(status, "not today")
        return web.Response(status=status, body=body, headers={headers.ROUTING_PATH: "fallback"})

    result = await sent(handler, call)
    assert (result.status, result.error) == (status, f"HTTP {status}: not today")
    assert result.routing_path is RoutingPath.FALLBACK


async def test_a_redirect_is_not_followed() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": "/elsewhere"})

    assert (await sent(handler, PLAIN)).error == "HTTP 307: an empty body"


@pytest.mark.parametrize(
    ("body", "message"), [({}, "no choice"), ({"choices": [{"text": "a"}]}, "no finish_reason")]
)
async def test_a_body_without_an_answer_is_an_error(body: object, message: str) -> None:
    assert message in str((await sent(answering(body), PLAIN)).error)


async def test_a_slow_server_times_out() -> None:
    result = await sent(Gate().handle, PLAIN, timeout=0.05)
    assert result.error == "timed out after 0.05 s"
    assert result.status is None


async def test_a_stalled_stream_times_out_and_keeps_its_part() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(GOOD[0])
        await asyncio.Event().wait()
        return response

    result = await sent(handler, STREAM, timeout=1.0)
    assert result.error == "timed out after 1 s"
    assert result.answer.text == "a"


async def test_an_unreachable_server_is_an_error() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        async with Client(f"http://127.0.0.1:{bound_socket.getsockname()[1]}", "tiny") as client:
            result = await client.send(STREAM)
    assert result.status is None
    assert "ClientConnectorError" in str(result.error)


def timed(*times: float) -> list[Timed]:
    return [Timed(at, Call("x", max_tokens=i + 1, stream=False)) for i, at in enumerate(times)]


async def test_open_loop_does_not_wait_for_answers() -> None:
    gate = Gate()
    progresses: list[Progress] = []
    async with serving(gate.handle) as url, Client(url, "tiny") as client:
        run = asyncio.create_task(
            run_open_loop(client.send, timed(0.02, 0, 0.01), on_progress=progresses.append)
        )
        await gate.holds(3)
        gate.open.set()
        results = await run
    assert [r.call.max_tokens for r in results] == [1, 2, 3]
    assert all(r.ok for r in results)
    assert progresses[2] == Progress(total=3, sent=3)
    assert progresses[-1] == Progress(total=3, sent=3, finished=3)


async def test_requests_go_out_in_order_of_time() -> None:
    order: list[int] = []

    async def send(call: Call) -> Result:
        order.append(call.max_tokens)
        return Result(call)

    await run_open_loop(send, timed(0.02, 0, 0.01))
    assert order == [2, 3, 1]


async def test_beyond_max_in_flight_a_request_fails_and_is_not_delayed() -> None:
    gate = Gate()
    progresses: list[Progress] = []
    async with serving(gate.handle) as url, Client(url, "tiny") as client:

        def watch(progress: Progress) -> None:
            progresses.append(progress)
            if progress.sent == 3:
                gate.open.set()

        results = await run_open_loop(
            client.send, timed(0, 0, 0), max_in_flight=2, on_progress=watch
        )
    assert [r.ok for r in results] == [True, True, False]
    assert results[2].error == "not sent: 2 requests were in flight already"
    assert progresses[-1] == Progress(total=3, sent=3, finished=3, failed=1)


async def test_cancelling_a_run_closes_its_connections() -> None:
    gate = Gate()
    async with serving(gate.handle) as url, Client(url, "tiny") as client:
        run = asyncio.create_task(run_open_loop(client.send, timed(0, 3600)))
        await gate.holds(1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await gate.left.wait()


async def test_a_run_without_calls_has_no_results() -> None:
    async with Client("http://127.0.0.1:1", "tiny") as client:
        assert await run_open_loop(client.send, []) == []


SCRIPT = Script(
    name="s",
    document="doc",
    questions=("q0", "q1"),
    steps=(Step(0, False), Step(1, False), Step(1, False)),
    chat=True,
    max_tokens=2,
)


async def test_a_conversation_carries_the_answers() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((await request.json())["messages"])
        answer = {"message": {"content": f"a{len(bodies)}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [answer]})

    reported: list[Result] = []
    async with serving(handler) as url, Client(url, "tiny") as client:
        results = await converse(client.send, SCRIPT, on_result=reported.append)
    assert reported == results
    assert [r.answer.text for r in results] == ["a1", "a2", "a3"]
    assert [m["content"] for m in bodies[1]] == ["doc", "q0", "a1", "q1"]
    assert bodies[2] == bodies[1]


async def test_a_conversation_ends_where_a_step_fails() -> None:
    async with serving(answering({}, status=500)) as url, Client(url, "tiny") as client:
        results = await converse(client.send, SCRIPT)
    assert [r.status for r in results] == [500]
