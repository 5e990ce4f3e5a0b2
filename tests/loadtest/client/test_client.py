"""The client against real servers: whole answers measured, everything else an error."""

import asyncio
import json
import socket
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from tandem_contract import headers
from tandem_contract.openai_errors import TYPES, error_body, error_event
from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Answer, Call, Message, Result, Usage
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.client.reasons import LEFT_OUT
from tandem_loadtest.records import Outcome

from ..servers import DONE, WHOLE, Gate, Handler, answering, chunk, serving, sse, streaming
from .raw import HandServer, Peer, Serve, always, chunked, once, raw_server, whole

STREAM = Call("once", max_tokens=2)
PLAIN = Call("once", max_tokens=2, stream=False)
USAGE = sse({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
GOOD = (chunk("a", 1), chunk("b", 2, "length"), USAGE)
ANSWER = Answer("ab", (1, 2), "length", Usage(3, 2))


def settings(url: str, **options: Any) -> ClientSettings:
    return ClientSettings(url=url, model="tiny", **options)


async def sent(handler: Handler, call: Call, **options: Any) -> Result:
    async with serving(handler) as url, Client(settings(url, **options)) as client:
        return await client.send(call)


async def sent_raw(serve: Serve, call: Call = STREAM, **options: Any) -> Result:
    async with raw_server(serve) as url, Client(settings(url, **options)) as client:
        return await client.send(call)


async def test_a_stream_is_read_and_measured() -> None:
    result = await sent(streaming(*GOOD, DONE), STREAM)
    assert (result.outcome, result.error, result.status) == (Outcome.OK, None, 200)
    assert result.answer == ANSWER
    times = (result.started, result.sent, result.first_token, result.last_token, result.ended)
    assert list(times) == sorted(time for time in times if time is not None)
    assert result.ttft is not None
    assert result.total is not None
    assert 0 < result.ttft <= result.ttft + sum(result.gaps) <= result.total


async def test_an_answer_without_streaming_is_read() -> None:
    result = await sent(answering(WHOLE), PLAIN)
    assert (result.outcome, result.error, result.answer) == (Outcome.OK, None, ANSWER)
    assert (result.ttft, result.first_token, result.last_token, result.gaps) == (None,) * 3 + ((),)
    assert result.total is not None


async def test_events_cut_by_the_network_are_joined() -> None:
    joined = b"".join([*GOOD, DONE])
    parts = (joined[i : i + 7] for i in range(0, len(joined), 7))
    result = await sent(streaming(*parts), STREAM)
    assert (result.outcome, result.answer) == (Outcome.OK, ANSWER)


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


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_request_reaches_the_api(suffix: str) -> None:
    requests: list[tuple[str, Any, str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append((request.path, await request.json(), request.headers[headers.REQUEST_ID]))
        return web.json_response(WHOLE)

    call = Call((Message("user", "é"),), max_tokens=4, stream=False)
    async with serving(handler) as url, Client(settings(url + suffix)) as client:
        assert (await client.send(call, request_id="r-1")).ok
    [(path, body, request_id)] = requests
    assert (path, request_id) == ("/v1/chat/completions", "r-1")
    assert body["messages"] == [{"role": "user", "content": "é"}]


@pytest.mark.parametrize(
    ("handler", "outcome", "message"),
    [
        (streaming(*GOOD, error_event(502, "the engine died"), DONE), "in-band", "engine died"),
        (streaming(b"event: error\ndata: overloaded\n\n", DONE), "in-band", "overloaded"),
        (streaming(chunk("a", 1, "abort"), USAGE, DONE), "in-band", "gave up"),
        (streaming(b"data: \xff\n\n"), "in-band", "not an answer of this API"),
        (answering(WHOLE), "in-band", "application/json; charset=utf-8, not an event stream"),
        (answering({"error": {"message": "died"}}), "in-band", "died"),
        (streaming(*GOOD), "truncated", "without [DONE]"),
        (streaming(*GOOD, b"data: [DONE]"), "truncated", "without [DONE]"),
        (streaming(*GOOD[:2], DONE), "truncated", "without usage"),
        (streaming(GOOD[0], USAGE, DONE), "truncated", "without a finish reason"),
        (streaming(), "truncated", "without a finish reason"),
        (streaming(GOOD[0], abort=True), "connection-lost", "before the answer did"),
        (streaming(*GOOD, DONE, abort=True), "connection-lost", "before the answer did"),
    ],
)
async def test_a_broken_stream_is_never_a_success(
    handler: Handler, outcome: str, message: str
) -> None:
    result = await sent(handler, STREAM)
    assert not result.ok
    assert result.outcome.startswith(outcome)
    assert message in str(result.error)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_that_is_not_asked_for_is_not_missed(options: object) -> None:
    extra = {"stream_options": options}
    result = await sent(streaming(*GOOD[:2], DONE), STREAM, extra_body=extra)
    assert (result.outcome, result.answer.usage) == (Outcome.OK, None)


async def test_the_part_before_a_broken_stream_is_kept() -> None:
    result = await sent(streaming(GOOD[0], error_event(502, "gone")), STREAM)
    assert (result.answer.text, result.answer.token_ids, result.error) == (
        "a",
        (1,),
        "BadGatewayError: gone",
    )
    assert result.ttft is not None


async def test_an_error_event_ends_the_request_although_the_server_goes_on() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(chunked(error_event(502, "gone"))[: -len("0\r\n\r\n")])
        await peer.end()

    assert (await sent_raw(serve)).outcome is Outcome.IN_BAND_ERROR


async def test_a_stream_cut_anywhere_is_truncated_or_lost() -> None:
    response = chunked(*GOOD, DONE)
    body = b"".join([*GOOD, DONE])
    for length in range(0, len(response), 3):
        result = await sent_raw(once(response[:length]))
        assert result.outcome is Outcome.CONNECTION_LOST, length
    for length in range(0, len(body), 3):
        result = await sent_raw(once(chunked(*filter(None, [body[:length]]))))
        assert result.outcome is Outcome.TRUNCATED, length
        assert "ab".startswith(result.answer.text)


async def test_a_body_cut_anywhere_is_lost() -> None:
    response = whole(json.dumps(WHOLE).encode())
    for length in range(0, len(response), 3):
        result = await sent_raw(once(response[:length]), PLAIN)
        assert result.outcome is Outcome.CONNECTION_LOST, length
        assert result.answer == Answer()


@pytest.mark.parametrize("call", [STREAM, PLAIN])
async def test_a_reset_is_a_lost_connection(call: Call) -> None:
    result = await sent_raw(once(chunked(*GOOD)[:-1], reset=True), call)
    assert result.outcome is Outcome.CONNECTION_LOST


async def test_what_is_not_http_is_an_error_in_band() -> None:
    result = await sent_raw(once(b"SSH-2.0-OpenSSH\r\n"))
    assert result.outcome is Outcome.IN_BAND_ERROR
    assert result.status is None
    assert "not an HTTP response" in str(result.error)


async def test_a_request_that_came_after_the_server_closed_is_sent_again_once() -> None:
    response = whole(json.dumps(WHOLE).encode())
    with HandServer() as server:
        async with Client(settings(server.url)) as client:
            first = asyncio.create_task(client.send(PLAIN))
            connection = await server.accept()
            await server.answer(connection, response)
            assert (await first).resent == 0
            answered = asyncio.create_task(server.answer_next(response))
            connection.close()
            result = await client.send(PLAIN)
            await answered
    assert (result.outcome, result.resent) == (Outcome.OK, 1)


async def test_a_request_that_is_sent_again_counts_from_its_first_sending() -> None:
    response = whole(json.dumps(WHOLE).encode())
    with HandServer() as server:
        async with Client(settings(server.url)) as client:
            first = asyncio.create_task(client.send(PLAIN))
            connection = await server.accept()
            await server.answer(connection, response)
            await first
            connection.close()
            again = asyncio.create_task(client.send(PLAIN))
            second = await server.accept()
            accepted = monotonic()
            await server.answer(second, response)
            result = await again
            second.close()
    assert result.sent is not None
    assert result.sent < accepted


async def test_a_request_whose_repetition_is_lost_is_lost() -> None:
    with HandServer() as server:
        async with Client(settings(server.url)) as client:
            first = asyncio.create_task(client.send(PLAIN))
            connection = await server.accept()
            await server.answer(connection, whole(json.dumps(WHOLE).encode()))
            await first
            answered = asyncio.create_task(server.answer_next(b""))
            connection.close()
            result = await client.send(PLAIN)
            await answered
    assert (result.outcome, result.resent) == (Outcome.CONNECTION_LOST, 1)


@pytest.mark.parametrize("reset", [False, True])
async def test_a_request_that_the_server_read_is_not_sent_again(reset: bool) -> None:
    asked, closing = asyncio.Event(), asyncio.Event()
    served: list[int] = []

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(whole(json.dumps(WHOLE).encode()))
        while await peer.request() is not None:
            served.append(peer.index)
            asked.set()
            await closing.wait()
            if reset:
                peer.reset()
            return

    async with raw_server(serve) as url, Client(settings(url)) as client:
        assert (await client.send(PLAIN)).ok
        task = asyncio.create_task(client.send(PLAIN))
        await asked.wait()
        closing.set()
        result = await task
    assert (result.outcome, result.resent) == (Outcome.CONNECTION_LOST, 0)
    assert served == [0]


async def test_a_request_on_a_new_connection_is_not_repeated() -> None:
    connections: list[int] = []

    async def serve(peer: Peer) -> None:
        connections.append(peer.index)
        await peer.request()

    result = await sent_raw(serve)
    assert result.outcome is Outcome.CONNECTION_LOST
    assert connections == [0]


async def test_many_requests_use_few_connections() -> None:
    connections: list[int] = []

    async def serve(peer: Peer) -> None:
        connections.append(peer.index)
        await always(chunked(*GOOD, DONE))(peer)

    async with raw_server(serve) as url, Client(settings(url)) as client:
        for _ in range(3):
            results = await asyncio.gather(*(client.send(STREAM) for _ in range(4)))
            assert all(result.ok for result in results)
    assert connections == [0, 1, 2, 3]


@pytest.mark.parametrize("call", [STREAM, PLAIN])
@pytest.mark.parametrize("status", [400, 404, 429, 503])
async def test_an_error_status_is_the_results_error(call: Call, status: int) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        body = error_body(status, "not today")
        return web.Response(status=status, body=body, headers={headers.ROUTING_PATH: "fallback"})

    result = await sent(handler, call)
    error = f"HTTP {status}: {TYPES[status]}: not today"
    assert (result.status, result.error) == (status, error)
    shed = status in (429, 503)
    assert result.outcome is (Outcome.SHED if shed else Outcome.ERROR_STATUS)
    assert result.routing_path is RoutingPath.FALLBACK


async def test_a_redirect_is_not_followed() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"location": "/elsewhere"})

    assert (await sent(handler, PLAIN)).error == "HTTP 307: an empty body"


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({}, Outcome.IN_BAND_ERROR),
        ({"error": {"message": "died"}}, Outcome.IN_BAND_ERROR),
        ({"choices": [{"text": "a"}]}, Outcome.TRUNCATED),
        ({"choices": [{"text": "a", "finish_reason": "error"}]}, Outcome.IN_BAND_ERROR),
    ],
)
async def test_a_body_without_an_answer_is_an_error(body: object, outcome: Outcome) -> None:
    result = await sent(answering(body), PLAIN)
    assert (result.outcome, result.ok) == (outcome, False)


async def test_a_slow_server_times_out() -> None:
    result = await sent(Gate().handle, PLAIN, timeout=0.05)
    assert (result.outcome, result.error) == (Outcome.TIMEOUT, "timed out after 0.05 s")
    assert result.status is None


async def test_a_stalled_stream_times_out_and_keeps_its_part() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(chunked(GOOD[0])[: -len("0\r\n\r\n")])
        await peer.end()

    result = await sent_raw(serve, timeout=1.0)
    assert (result.outcome, result.error) == (Outcome.TIMEOUT, "timed out after 1 s")
    assert result.answer.text == "a"


async def test_a_server_that_accepts_no_connection_times_out() -> None:
    async def serve(peer: Peer) -> None:
        await peer.end()

    # The server waits for HTTP, the client for TLS.
    async with (
        raw_server(serve) as url,
        Client(settings(url.replace("http", "https"), timeout=0.05)) as client,
    ):
        result = await client.send(STREAM)
    assert (result.outcome, result.error) == (Outcome.TIMEOUT, "no connection within 0.05 s")
    assert result.sent is None


async def test_an_unreachable_server_is_an_error() -> None:
    with socket.socket() as bound_socket:
        bound_socket.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_socket.getsockname()[1]}"
        async with Client(settings(url)) as client:
            result = await client.send(STREAM)
    assert (result.outcome, result.status) == (Outcome.CONNECTION_LOST, None)
    assert str(result.error).endswith("Connection refused")


async def test_cancelling_a_request_closes_its_connection() -> None:
    gate = Gate()
    async with serving(gate.handle) as url, Client(settings(url)) as client:
        task = asyncio.create_task(client.send(PLAIN))
        await gate.holds(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gate.left.wait()


SECRET = {"authorization": "Bearer sk-SECRET"}
TALK = (Message("system", "answer briefly"), Message("user", "My card number ends in 4711, why?"))
IDS = (11001, 11002, 11003, 11004)


async def test_a_credential_that_the_server_repeats_is_not_shown() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        message = f"unknown: {request.headers['authorization']}\x1b[2J"
        return web.Response(status=401, body=error_body(401, message))

    result = await sent(handler, PLAIN, headers=SECRET)
    assert result.error == "HTTP 401: AuthenticationError: unknown: [redacted]"


async def test_a_credential_in_a_response_header_is_not_shown() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"content-type": request.headers["authorization"]})

    result = await sent(handler, STREAM, headers=SECRET)
    assert result.error == "the answer is [redacted], not an event stream"


@pytest.mark.parametrize("call", [Call(TALK, 2), Call(TALK, 2, stream=False), Call(IDS, 2)])
async def test_a_prompt_that_the_server_repeats_is_not_shown(call: Call) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        text = (await request.read()).decode()
        return web.Response(status=400, body=error_body(400, f"cannot read {text}"))

    result = await sent(handler, call)
    assert result.error == f"HTTP 400: BadRequestError: {LEFT_OUT}"


@pytest.mark.parametrize("call", [Call(TALK, 2), Call(IDS, 2)])
async def test_a_prompt_in_an_error_event_is_not_shown(call: Call) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        members = await request.json()
        message = f"died of {members.get('messages') or members['prompt']}"
        return await streaming(chunk("a", 1), error_event(502, message))(request)

    result = await sent(handler, call)
    assert result.outcome is Outcome.IN_BAND_ERROR
    assert result.error == f"BadGatewayError: {LEFT_OUT}"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_in_an_error_of_status_200_is_not_shown(stream: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        content = (await request.json())["messages"][1]["content"]
        return web.json_response({"error": {"message": f"no {content}", "type": "Bad"}})

    result = await sent(handler, Call(TALK, 2, stream=stream))
    assert (result.outcome, result.error) == (Outcome.IN_BAND_ERROR, f"Bad: {LEFT_OUT}")


async def test_an_answer_in_an_error_event_is_not_shown() -> None:
    text = "generated text of the model"
    result = await sent(streaming(chunk(text, 1), error_event(502, f"no call: {text}")), STREAM)
    assert result.error == f"BadGatewayError: {LEFT_OUT}"
