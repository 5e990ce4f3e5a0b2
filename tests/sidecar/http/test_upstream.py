"""Connections to engines: reused, replaced when stale, and answers of every framing."""

import asyncio
import errno
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Failure
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool

from ..conftest import Harness
from ..peers import PARAMS, Script, Turn
from ..wire import wire

BODY = b'{"prompt": "Hi"}'


async def _empty(turn: Turn) -> None:
    turn.answer(200, b"{}")


def _first_of_each_connection(answer: Script) -> Script:
    """A script that answers one request of each connection, and closes it at the second."""
    served: set[asyncio.StreamWriter] = set()

    async def script(turn: Turn) -> None:
        if turn.writer in served:
            turn.die()
            return
        served.add(turn.writer)
        await answer(turn)

    return script


async def test_connections_are_reused(harness: Harness) -> None:
    await harness.start()
    for _ in range(5):
        async with harness.http.post(harness.url(), data=BODY) as answer:
            assert answer.status == 200
    assert harness.decode.connections <= 3, "health check and scrape may hold one more each"


async def test_a_stale_connection_is_replaced_once(harness: Harness) -> None:
    """The engine closes a pooled connection just as the next request is sent on it."""
    await harness.start(_first_of_each_connection(_empty))
    for _ in range(4):
        async with harness.http.post(harness.url(), data=BODY) as answer:
            assert answer.status == 200


async def test_a_request_on_a_new_connection_is_not_sent_again(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.die()

    await harness.start(script)
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert answer.status == 502


async def test_a_stale_prefill_connection_costs_no_candidate(harness: Harness) -> None:
    async def answer(turn: Turn) -> None:
        await harness.prefills[0].default(turn)

    await harness.prefill(_first_of_each_connection(answer))
    await harness.start()
    for _ in range(3):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert answer.headers["x-continuum-routing-path"] == "prefill_then_decode"
    assert await harness.metric("tandem_sidecar_retries_total") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_an_answer_that_ends_with_the_connection(harness: Harness, path: str) -> None:
    async def script(turn: Turn) -> None:
        turn.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
        await turn.writer.drain()
        turn.writer.close()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, path=path)
        answer = await client.response()
    assert answer.headers["connection"] == "close"
    assert answer.body == b"all of it"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("status", [200, 204, 304])
async def test_a_connection_is_usable_after_an_answer_without_a_body(
    harness: Harness, method: str, status: int
) -> None:
    async def script(turn: Turn) -> None:
        if turn.request.target == "/v1/models?next":
            turn.answer(200, b"next")
        elif status == 200:
            turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
            turn.send(b"" if method == "HEAD" else b"12345")
        else:
            turn.send(b"HTTP/1.1 %d X\r\netag: z\r\n\r\n" % status)

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.send(f"{method} /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        answer = await client.response(head=method == "HEAD")
        assert answer.status == status
        client.send(b"GET /v1/models?next HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.response()).body == b"next"


async def test_interim_responses_are_skipped(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        turn.answer(200, b"{}")

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY)
        answer = await client.response()
    assert (answer.status, answer.body) == (200, b"{}")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
    ],
)
async def test_an_invalid_http_answer_is_a_502(harness: Harness, answer: bytes) -> None:
    async def script(turn: Turn) -> None:
        turn.send(answer)
        await turn.gone.wait()

    await harness.start(script)
    async with harness.http.post(harness.url(), data=BODY) as response:
        assert response.status == 502


async def test_surplus_bytes_close_the_connection(harness: Harness) -> None:
    """Bytes after an answer must not be parsed as the head of the next one."""

    async def script(turn: Turn) -> None:
        turn.answer(200, b"{}")
        turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison")

    await harness.start(script)
    for _ in range(3):
        async with harness.http.post(harness.url(), data=BODY) as answer:
            assert await answer.read() == b"{}"


async def test_hop_by_hop_headers_stay_on_their_hop(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(
            200, b"{}", "connection: keep-alive, x-hop", "x-hop: 1", "keep-alive: timeout=5"
        )

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, "connection: x-mine", "x-mine: 1", "te: trailers", "x-end: 2")
        answer = await client.response()
    assert not {"connection", "x-hop", "keep-alive"} & set(answer.headers)
    engine_headers = harness.decode.requests[0].headers
    assert not {"connection", "x-mine", "te"} & set(engine_headers)
    assert engine_headers["x-end"] == "2"


async def test_a_chunked_prefill_answer_is_read(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        answer = Turn(turn.request, turn.writer)
        body = b'{"kv_transfer_params": ' + PARAMS + b"}"
        for at in range(0, len(body), 7):
            piece = body[at : at + 7]
            answer.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await turn.writer.drain()
        answer.end()

    await harness.prefill(script)
    await harness.start()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as response:
        assert response.headers["x-continuum-routing-path"] == "prefill_then_decode"
    assert PARAMS in harness.decode.requests[0].body


async def test_large_bodies_both_ways(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(200, turn.request.body)

    await harness.start(script)
    body = b'{"prompt": "' + b"x" * (8 * 2**20) + b'"}'
    async with wire(harness.sidecar.listen) as client:
        client.post(body)
        assert (await client.response()).body == body
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_leg_that_reads_kv_is_sent_once(harness: Harness) -> None:
    """The engine may have read the KV already: its blocks may belong to another prompt by now."""
    await harness.prefill()
    await harness.start(_first_of_each_connection(_empty))
    paths = []
    for _ in range(4):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert answer.status == 200
            paths.append(answer.headers["x-continuum-routing-path"])
    assert "fallback" in paths
    read = [
        r.json["kv_transfer_params"] for r in harness.decode.requests if b"remote_host" in r.body
    ]
    assert len(read) == len(paths), "each hand-off's KV is read by one leg"
    await asyncio.wait_for(harness.decode.released.wait(), 10)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_aborted_call_ends_at_the_engine_before_anything_else_is_sent(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A client that is answered after the abort finds that the engine was told already."""

    async def abort() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            request = request_bytes(b"POST", b"/", [], BODY)
            address, answer = HostPort(*server.getsockname()), Collector(lambda _: None)
            call = Pool().send(address, b"POST", request, answer)
            engine, _ = await loop.sock_accept(server)
            with engine:
                received = b""
                while not received.endswith(BODY):
                    received += await loop.sock_recv(engine, 1024)
                engine.settimeout(10)
                call.abort()
                # Blocks the loop: what it would do in its next turn is not done yet.
                assert engine.recv(1) == b""

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(abort())


@pytest.mark.interpreted
async def test_a_connection_that_the_system_gives_up_without_a_limit_of_ours_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connect call failed ('127.0.0.1', 1)")

    pool = Pool()
    monkeypatch.setattr(pool, "connect", connect)
    done: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()
    collector = Collector(done.set_result)
    pool.send(HostPort("127.0.0.1", 1), b"GET", b"", collector, connect_timeout=None)
    expected = NoAnswer(Failure.UNREACHABLE, "127.0.0.1:1: Connection timed out")
    assert await asyncio.wait_for(done, 10) == expected


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_was_made_while_the_loop_stood_still_is_not_late(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def connect() -> Answer | NoAnswer:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Answer | NoAnswer] = loop.create_future()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            address = HostPort(*server.getsockname())
            request = request_bytes(b"GET", b"/", [], b"")
            Pool().send(address, b"GET", request, Collector(done.set_result), connect_timeout=1.0)
            # The task that connects begins in the next turn.
            loop.call_soon(loop.call_soon, time.sleep, 1.1)
            engine, _ = await loop.sock_accept(server)
            with engine:
                await loop.sock_recv(engine, 1024)
                await loop.sock_sendall(engine, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                return await asyncio.wait_for(done, 10)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert isinstance(runner.run(connect()), Answer)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_is_not_made_in_time_is_reported(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def connect() -> Answer | NoAnswer:
        done: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()
        # The system answers no further connection once as many wait.
        with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.socket() as first:
            address = HostPort(*server.getsockname())
            first.connect(address)
            Pool().send(address, b"GET", b"", Collector(done.set_result), connect_timeout=0.05)
            return await asyncio.wait_for(done, 10)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        answer = runner.run(connect())
    assert isinstance(answer, NoAnswer)
    assert answer.failure is Failure.UNREACHABLE
    assert answer.detail.endswith(": no connection within 0.05s")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tcp_asks_a_silent_host_whether_it_is_there(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            connection = await Pool().connect(HostPort(*server.getsockname()), plain=True)
            with connection._transport.get_extra_info("socket").dup() as own:
                assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            connection.drop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(connect())
