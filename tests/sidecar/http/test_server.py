"""What well and badly behaved clients do to a connection."""

import asyncio

import pytest

from tandem_http1.client import Limits

from ..conftest import Harness
from ..peers import Turn
from ..wire import wire

BODY = b'{"prompt": "Hi"}'


async def test_requests_share_a_connection(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        for _ in range(3):
            client.post(BODY)
            assert (await client.response()).status == 200


async def test_pipelined_requests_are_answered_in_order(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(200, turn.request.body)

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        for i in range(20):
            client.post(b'{"prompt": "%d"}' % i)
        for i in range(20):
            assert (await client.response()).body == b'{"prompt": "%d"}' % i


async def test_a_request_arriving_byte_by_byte(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        for byte in b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}":
            client.send(bytes([byte]))
            await client.writer.drain()
        assert (await client.response()).status == 200


async def test_chunked_request_bodies_and_their_trailers(harness: Harness) -> None:
    await harness.prefill()
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b'5\r\n{"a":\r\n3\r\n"b"\r\n1\r\n}\r\n'
            b"0\r\nx-prefiller-host-port: "
            + str(harness.prefills[0].address).encode()
            + b"\r\n\r\n"
        )
        answer = await client.response()
    assert answer.headers["x-continuum-routing-path"] == "unified"
    [request] = harness.decode.requests
    assert request.body == b'{"a":"b"}'
    assert "transfer-encoding" not in request.headers
    assert request.headers["content-length"] == "9"


async def test_expect_continue_is_answered_before_the_body(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: 2\r\n\r\n"
        )
        assert (await client.response()).status == 100
        client.send(b"{}")
        assert (await client.response()).status == 200
    assert "expect" not in harness.decode.requests[0].headers


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000, 431),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            b"400\r\n" + b"x" * 1024 + b"\r\n",
            413,
        ),
    ],
)
async def test_a_refused_request_gets_an_error_and_the_connection_closes(
    harness: Harness, data: bytes, status: int
) -> None:
    await harness.start(limits=Limits(body=1000))
    async with wire(harness.sidecar.listen) as client:
        client.send(data)
        answer = await client.response()
        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert b'"error"' in answer.body
        assert await client.closed() == b""
    assert harness.decode.requests == []


async def test_a_refusal_follows_the_answers_before_it(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.post(b"{}")
        client.send(b"nonsense\r\n\r\n")
        assert (await client.response()).status == 200
        assert (await client.response()).status == 400
        assert await client.closed() == b""


async def test_a_slow_request_is_timed_out(harness: Harness) -> None:
    await harness.start(limits=Limits(request_seconds=0.1))
    async with wire(harness.sidecar.listen) as client:
        client.send(b"POST / HTTP/1.1\r\n")
        assert (await client.response()).status == 408
        assert await client.closed() == b""


async def test_an_idle_connection_is_closed(harness: Harness) -> None:
    await harness.start(limits=Limits(idle_seconds=0.1, request_seconds=0.1))
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY)
        assert (await client.response()).status == 200
        assert await client.closed() == b""


async def test_a_long_answer_does_not_count_as_idle(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        await harness.go.wait()
        turn.answer(200, b"{}")

    await harness.start(script, limits=Limits(idle_seconds=0.05, request_seconds=0.05))
    async with wire(harness.sidecar.listen) as slow, wire(harness.sidecar.listen) as idle:
        slow.post(BODY)
        await harness.decode.received(1)
        assert await idle.closed() == b""
        harness.go.set()
        assert (await slow.response()).status == 200


async def test_connection_close_is_honoured(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, "connection: close")
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.closed() == b""


async def test_http_1_0_gets_no_chunks(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        body = b'{"stream": true}'
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.send(head + body)
        answer = await client.response()
    assert "transfer-encoding" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert answer.body.startswith(b"data: {")
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_half_closing_ends_a_generation(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY)
        await harness.decode.received(1)
        client.writer.write_eof()
        await asyncio.wait_for(disconnect.wait(), 10)
        assert await client.closed() == b""


async def test_half_closing_still_gets_other_answers(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        await harness.go.wait()
        turn.answer(200, b"[]")

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        client.writer.write_eof()
        await harness.decode.received(1)
        harness.go.set()
        assert (await client.response()).body == b"[]"
        assert await client.closed() == b""
