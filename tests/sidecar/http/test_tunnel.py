"""Websockets through the sidecar, and other requests to switch protocols."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSCloseCode, WSMsgType, web

from tandem_contract.commandline import HostPort
from tandem_http1.client import Limits

from ..conftest import Harness
from ..peers import Turn
from ..wire import wire

Talk = Callable[[web.WebSocketResponse, web.Request], Awaitable[None]]
LARGE = 4 * 2**20


@asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[HostPort]:
    """An engine that serves every websocket by `talk`."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=2 * LARGE)
        await socket.prepare(request)
        await talk(socket, request)
        return socket

    app = web.Application()
    app.router.add_get("/v1/realtime", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield HostPort("127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def echo(socket: web.WebSocketResponse, _request: web.Request) -> None:
    async for message in socket:
        await socket.send_bytes(message.data)


async def test_messages_go_both_ways_whatever_their_size(harness: Harness) -> None:
    async with talking(echo) as engine:
        await harness.start(engine=engine)
        async with harness.http.ws_connect(harness.url("/v1/realtime"), max_msg_size=0) as socket:
            for size in (0, 1, 70_000, LARGE):
                message = bytes(i % 251 for i in range(1000)) * (size // 1000) + b"x" * (size % 9)
                await socket.send_bytes(message)
                assert await socket.receive_bytes() == message
            assert [work.describe()["phase"] for work in harness.sidecar.lifecycle.work] == [
                "tunnel"
            ]
        assert socket.close_code == WSCloseCode.OK
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_client_that_does_not_read_holds_the_engine_back(harness: Harness) -> None:
    """Back-pressure: the engine cannot have written everything while the client reads nothing."""
    blocked = asyncio.Event()

    async def flood(socket: web.WebSocketResponse, request: web.Request) -> None:
        transport = request.transport
        assert transport is not None
        for _ in range(64):
            sending = asyncio.ensure_future(socket.send_bytes(bytes(2**20)))
            done, _ = await asyncio.wait([sending], timeout=0.5)
            if not done:
                blocked.set()
            await sending

    async with talking(flood) as engine:
        await harness.start(engine=engine)
        async with wire(harness.sidecar.listen) as client:
            client.send(UPGRADE)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport
            await asyncio.wait_for(blocked.wait(), 20)
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a transport
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ")
            received = 0
            while received < 64 * 2**20:
                received += len(await client.reader.read(2**20))


async def test_the_engine_closing_first_says_why(harness: Harness) -> None:
    async def leave(socket: web.WebSocketResponse, _request: web.Request) -> None:
        await socket.close(code=WSCloseCode.TRY_AGAIN_LATER, message=b"later")

    async with talking(leave) as engine:
        await harness.start(engine=engine)
        async with harness.http.ws_connect(harness.url("/v1/realtime")) as socket:
            message = await socket.receive()
            assert (message.type, message.data) == (WSMsgType.CLOSE, WSCloseCode.TRY_AGAIN_LATER)
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_an_engine_that_dies_ends_the_tunnel(harness: Harness) -> None:
    async def die(socket: web.WebSocketResponse, request: web.Request) -> None:
        await socket.send_str("last words")
        assert request.transport is not None
        request.transport.abort()

    async with talking(die) as engine:
        await harness.start(engine=engine)
        async with harness.http.ws_connect(harness.url("/v1/realtime")) as socket:
            kinds = [(await socket.receive()).type for _ in range(2)]
        assert kinds[-1] in (WSMsgType.CLOSED, WSMsgType.ERROR)
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_client_that_dies_ends_the_tunnel(harness: Harness) -> None:
    engine_close = asyncio.Event()

    async def wait(socket: web.WebSocketResponse, _request: web.Request) -> None:
        await socket.receive()
        engine_close.set()

    async with talking(wait) as engine:
        await harness.start(engine=engine)
        async with wire(harness.sidecar.listen) as client:
            client.send(UPGRADE)
            await client.reader.readuntil(b"\r\n\r\n")
            client.writer.transport.abort()
            await asyncio.wait_for(engine_close.wait(), 10)
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_drain_that_expires_ends_tunnels_and_takes_no_more(harness: Harness) -> None:
    async with talking(echo) as engine:
        await harness.start(engine=engine, drain_timeout=0.1)
        async with harness.http.ws_connect(harness.url("/v1/realtime")) as socket:
            await socket.send_bytes(b"x")
            await socket.receive_bytes()
            harness.sidecar.lifecycle.drain()
            assert (await socket.receive()).type in (WSMsgType.CLOSED, WSMsgType.ERROR)
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
        async with harness.http.get(harness.url("/v1/realtime"), headers=ASKING) as answer:
            assert answer.status == 503


ASKING = {"connection": "Upgrade", "upgrade": "raw"}
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\n"
    b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"x-tandem-plan: forged\r\nx-data-parallel-rank: 7\r\n\r\n"
)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: raw\r\n\r\n"


async def test_the_handshake_is_forwarded_without_forbidden_headers(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.send(SWITCH[:-2] + b"x-tandem-timing: queue=1\r\nx-mine: 1\r\n\r\nfrom the engine")
        await turn.gone.wait()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.send(UPGRADE)
        answer = await client.response()
        assert await client.reader.readexactly(15) == b"from the engine"
    assert answer.status == 101
    assert (answer.headers["connection"], answer.headers["upgrade"]) == ("upgrade", "raw")
    assert answer.headers["x-mine"] == "1"
    assert "x-tandem-timing" not in answer.headers
    engine_headers = harness.decode.requests[0].headers
    assert (engine_headers["connection"], engine_headers["upgrade"]) == ("upgrade", "websocket")
    assert engine_headers["sec-websocket-version"] == "13"
    assert not {"x-tandem-plan", "x-data-parallel-rank"} & set(engine_headers)


@pytest.mark.parametrize("first", ["client", "engine"])
async def test_one_side_may_end_before_the_other(harness: Harness, first: str) -> None:
    """Data sent after the other side ended still arrives."""
    reader_of: asyncio.Queue[asyncio.StreamReader] = asyncio.Queue()
    writer_of: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/v1/realtime" not in head:  # a probe or a scrape
            writer.close()
            return
        writer.write(SWITCH)
        reader_of.put_nowait(reader)
        writer_of.put_nowait(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    await harness.start(engine=HostPort(*server.sockets[0].getsockname()))
    async with wire(harness.sidecar.listen) as client:
        client.send(UPGRADE + b"early")
        await client.reader.readuntil(b"\r\n\r\n")
        engine_reader, engine_writer = await reader_of.get(), await writer_of.get()
        assert await engine_reader.readexactly(5) == b"early"
        ours, theirs = (client.writer, engine_reader), (engine_writer, client.reader)
        (goes, sees), (stays, hears) = (ours, theirs) if first == "client" else (theirs, ours)
        goes.write_eof()
        async with asyncio.timeout(10):
            assert await sees.read() == b""
            stays.write(b"still here")
            stays.write_eof()
            assert await hears.read() == b"still here"
            await harness.sidecar.lifecycle.idle()
        engine_writer.close()
    server.close()


async def test_a_refused_upgrade_is_an_ordinary_answer(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.send(UPGRADE)
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(2):
            assert (await client.response()).status == 200
    assert [r.target for r in harness.decode.requests] == ["/v1/realtime", "/v1/models"]


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"upgrade: websocket\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", b"{}"),
        (b"upgrade: h2c\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_an_unsupported_upgrade_is_served_as_http_1_1(
    harness: Harness, head: bytes, body: bytes
) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(200, b"{}")

    await harness.start()
    harness.decode.script = script
    asking = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\n" + head
    async with wire(harness.sidecar.listen) as client:
        client.send(asking * 3)
        for _ in range(3):
            assert (await client.response()).status == 200
    assert [r.body for r in harness.decode.requests] == [body] * 3
    assert not {"connection", "upgrade"} & set(harness.decode.requests[0].headers)


async def test_a_101_without_an_upgrade_request_is_malformed(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.send(SWITCH)
        await turn.gone.wait()

    await harness.start(script)
    async with harness.http.get(harness.url("/v1/models")) as answer:
        assert answer.status == 502


async def test_an_idle_tunnel_is_closed(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.send(SWITCH)
        await turn.gone.wait()

    await harness.start(script, limits=Limits(idle_seconds=0.1, request_seconds=0.1))
    async with wire(harness.sidecar.listen) as client:
        client.send(UPGRADE)
        await client.response()
        assert await client.closed() == b""
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
