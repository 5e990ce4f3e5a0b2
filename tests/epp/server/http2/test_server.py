"""The server over real sockets: probes, TLS, deadlines, back-pressure and its end."""

import asyncio
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme
import uvloop

from tandem_contract.server_tls import CERTIFICATE, KEY
from tandem_epp.server.http2 import frames
from tandem_epp.server.http2 import health_pb2 as pb
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import FrameType, Setting
from tandem_epp.server.http2.grpc import framed
from tandem_epp.server.http2.health import (
    NOT_SERVING,
    SERVICE,
    SERVICE_UNKNOWN,
    SERVING,
    HealthService,
)
from tandem_epp.server.http2.limits import LAST_STREAM, Limits
from tandem_epp.server.http2.server import Server
from tandem_epp.server.http2.session import Call, GrpcSession
from tandem_epp.server.http2.tls import TlsSettings, load_certificate, tls_context

from ...real import until
from .client import BLOCK, HEADER, PATH, START, Frame, block, data, headers, message, ping

pytestmark = pytest.mark.component


class Echo:
    """Answers each message with itself."""

    def __init__(self, call: Call) -> None:
        self.call = call
        alive.add(self)

    def on_message(self, message: bytes) -> None:
        self.call.send(message)

    def on_over_budget(self) -> None:
        pass

    def on_half_close(self) -> None:
        self.call.finish()

    def on_end(self) -> None:
        pass


alive: weakref.WeakSet[Echo] = weakref.WeakSet()
"""The handlers in memory."""


class Serving:
    """A server on a free port."""

    def __init__(self, limits: Limits) -> None:
        self.is_ready = True
        self.health = HealthService(lambda: self.is_ready, frozenset(("test.Service",)))
        self.server = Server({PATH: Echo}, self.health, limits)
        self.port = 0

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
    *,
    allows_clear: bool = False,
) -> AsyncIterator[Serving]:
    serving = Serving(limits or Limits())
    serving.port = await serving.server.listen("127.0.0.1", 0, tls, allows_clear=allows_clear)
    try:
        yield serving
    finally:
        await serving.server.stop(0)


class RawClient:
    """Single frames over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def frame(self) -> Frame:
        """The next frame of the server. Raises IncompleteReadError at the end."""
        head = await self.reader.readexactly(HEADER.size)
        high, low, kind, flags, stream = HEADER.unpack(head)
        payload = await self.reader.readexactly(high << 8 | low)
        return Frame(FrameType(kind), flags, stream, payload)

    async def until(self, kind: FrameType) -> Frame:
        while (frame := await self.frame()).kind is not kind:
            pass
        return frame

    async def ends(self) -> bool:
        """Whether the server closes; reads everything before."""
        with suppress(ConnectionError):
            await self.reader.read()
        return True


@asynccontextmanager
async def connected(port: int, start: bytes = START) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = RawClient(reader, writer)
    client.send(start)
    try:
        yield client
    finally:
        writer.close()


def echo(channel: grpc.aio.Channel) -> "grpc.aio.StreamStreamMultiCallable[bytes, bytes]":
    return channel.stream_stream(PATH)


async def test_grpcs_client_calls() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.target) as channel:
        call = echo(channel)()
        for text in (b"a", b"", bytes(100_000)):
            await call.write(text)
            assert await call.read() == text
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_what_grpcs_client_sees_of_errors() -> None:
    async with serving() as served:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(served.target, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await channel.unary_unary("/test.Service/Unknown")(b"")
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            call = echo(channel)()
            await call.write(bytes(Limits().message + 1))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            packed = echo(channel)(compression=grpc.Compression.Gzip)
            await packed.write(bytes(1000))
            assert await packed.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_ends_a_call() -> None:
    """Raw frames: a client of grpc would end the call itself."""
    async with serving() as served, connected(served.port) as client:
        client.send(headers(1, BLOCK + block({"grpc-timeout": "10m"})))
        answer = await client.until(FrameType.HEADERS)
        assert b"grpc-status\x014" in answer.payload


def issue(authority: trustme.CA, directory: Path) -> None:
    """Write a certificate for localhost."""
    pair = authority.issue_cert("localhost")
    chain = b"".join(part.bytes() for part in pair.cert_chain_pems)
    (directory / CERTIFICATE).write_bytes(chain)
    (directory / KEY).write_bytes(pair.private_key_pem.bytes())


async def test_a_new_certificate_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    issue(old, tmp_path)
    context = tls_context(TlsSettings(directory=tmp_path))
    (tmp_path / KEY).write_bytes(new.issue_cert("localhost").private_key_pem.bytes())
    with pytest.raises(ssl.SSLError):
        load_certificate(context, tmp_path)

    async def is_trusted(authority: trustme.CA, port: int) -> bool:
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        try:
            _, writer = await asyncio.open_connection("localhost", port, ssl=trusting)
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True

    async with serving(tls=context) as served:
        assert await is_trusted(old, served.port)
        issue(new, tmp_path)
        load_certificate(context, tmp_path)
        assert await is_trusted(new, served.port)
        assert not await is_trusted(old, served.port)


@pytest.mark.parametrize("version", ["h2", "http/1.1"])
async def test_tls_with_alpn(tmp_path: Path, version: str) -> None:
    authority = trustme.CA()
    issue(authority, tmp_path)
    async with serving(tls=tls_context(TlsSettings(directory=tmp_path))) as served:
        if version == "h2":
            root = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
            async with grpc.aio.secure_channel(f"localhost:{served.port}", root) as channel:
                call = echo(channel)()
                await call.write(bytes(200_000))
                assert await call.read() == bytes(200_000)
                call.cancel()
            return
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        url = f"https://localhost:{served.port}/readyz"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=trusting) as answer:
            assert (answer.status, await answer.text()) == (200, "ready\n")


@pytest.mark.parametrize(
    ("path", "ready", "status", "text"),
    [
        ("/healthz", False, 200, "ok\n"),
        ("/readyz", True, 200, "ready\n"),
        ("/readyz?x=1", False, 503, "not ready\n"),
        ("/metrics", True, 404, "not found\n"),
    ],
)
async def test_probes_by_http_1_1(path: str, ready: bool, status: int, text: str) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        served.is_ready = ready
        async with session.get(f"http://{served.target}{path}") as answer:
            assert (answer.status, await answer.text()) == (status, text)
        async with session.head(f"http://{served.target}{path}") as answer:
            assert answer.status == status


@pytest.mark.parametrize("head", [b"GET /healthz HTTP/1.1 x\r\n\r\n", b"GET " + b"x" * 9000])
async def test_malformed_probes(head: bytes) -> None:
    async with serving() as served, connected(served.port, head[:2]) as client:
        client.send(head[2:])
        assert (await client.reader.read()).startswith(b"HTTP/1.1 400 ")


async def test_grpcs_health_service() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.target) as channel:
        check = channel.unary_unary(
            f"/{SERVICE}/Check",
            request_serializer=pb.HealthCheckRequest.SerializeToString,
            response_deserializer=pb.HealthCheckResponse.FromString,
        )
        ready = ("", "test.Service", "readiness", "inference-extension")
        for service in (*ready, "liveness"):
            assert (await check(pb.HealthCheckRequest(service=service))).status == SERVING
        served.is_ready = False
        for service in ready:
            assert (await check(pb.HealthCheckRequest(service=service))).status == NOT_SERVING
        assert (await check(pb.HealthCheckRequest(service="liveness"))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(pb.HealthCheckRequest(service="other"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_grpcs_health_watch_follows_the_state() -> None:
    async with serving() as served, grpc.aio.insecure_channel(served.target) as channel:
        method = channel.unary_stream(
            f"/{SERVICE}/Watch",
            request_serializer=pb.HealthCheckRequest.SerializeToString,
            response_deserializer=pb.HealthCheckResponse.FromString,
        )
        other = method(pb.HealthCheckRequest(service="other"))
        assert (await other.read()).status == SERVICE_UNKNOWN
        other.cancel()
        call = method(pb.HealthCheckRequest())
        assert (await call.read()).status == SERVING
        served.is_ready = False
        assert (await call.read()).status == NOT_SERVING
        served.is_ready = True
        assert (await call.read()).status == SERVING
        await served.server.stop(10)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert not served.health.is_watched


async def test_stop_finishes_calls_and_takes_no_new_ones() -> None:
    async with serving() as served, connected(served.port) as client:
        client.send(headers(1), message(1, b"hi"))
        assert (await client.until(FrameType.DATA)).payload == framed(b"hi")
        stopping = asyncio.create_task(served.server.stop(100))
        first = await client.until(FrameType.GOAWAY)
        assert frames.read_id(first.payload) == LAST_STREAM
        question = await client.until(FrameType.PING)
        # Opened before this client could know: served.
        client.send(headers(3), ping(question.payload, ack=True), message(3, b"late"))
        assert frames.read_id((await client.until(FrameType.GOAWAY)).payload) == 3
        assert (await client.until(FrameType.DATA)).payload == framed(b"late")
        client.send(data(1, end=True), data(3, end=True))
        for _ in range(2):
            end = await client.until(FrameType.HEADERS)
            assert b"grpc-status\x010" in end.payload
        await stopping
        assert await client.ends()


async def test_stop_aborts_calls_after_its_grace() -> None:
    async with serving() as served, connected(served.port) as client:
        client.send(headers(1), message(1, b"hi"))
        await client.until(FrameType.DATA)
        await served.server.stop(0.01)
        assert await client.ends()
        assert not served.server.connections


async def test_no_call_is_lost_while_the_server_drains() -> None:
    """Clients that open calls all the time: each is either served to its end, or refused in a way
    that tells the client to send it elsewhere."""
    async with serving() as served, grpc.aio.insecure_channel(served.target) as channel:
        results: list[grpc.StatusCode] = []
        is_stopped = False

        async def client() -> None:
            while not is_stopped:
                call = echo(channel)()
                try:
                    await call.write(b"x" * 2000)
                    assert await call.read() == b"x" * 2000
                    await call.done_writing()
                    results.append(await call.code())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    results.append(await call.code())
                    return

        clients = [asyncio.create_task(client()) for _ in range(20)]

        async def busy() -> bool:
            return len(results) > 200

        await until(busy)
        await served.server.stop(20)
        is_stopped = True
        await asyncio.gather(*clients)
        # A refused connection is UNAVAILABLE before anything was sent on it.
        assert set(results) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert results.count(grpc.StatusCode.UNAVAILABLE) <= len(clients)


async def test_a_client_without_a_preface_is_disconnected() -> None:
    async with serving(Limits(preface_seconds=0.0)) as served:
        for start in (b"", b"PRI * HT", b"GET /healthz HTTP/1.1\r\n", frames.PREFACE):
            async with connected(served.port, start) as client:
                assert await client.ends()


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with serving(Limits(connections=1)) as served, connected(served.port) as client:
        client.send(ping())
        await client.until(FrameType.PING)
        async with connected(served.port) as second:
            assert await second.ends()
        client.send(ping())
        await client.until(FrameType.PING)


async def test_a_flood_ends_with_goaway_and_the_others_go_on() -> None:
    async with (
        serving() as served,
        connected(served.port) as attacker,
        connected(served.port) as other,
    ):
        attacker.send(*[ping()] * 5000)
        assert (await attacker.until(FrameType.GOAWAY)).code is ErrorCode.ENHANCE_YOUR_CALM
        other.send(headers(1), message(1, b"hi"))
        assert (await other.until(FrameType.DATA)).payload == framed(b"hi")


async def test_a_peer_that_does_not_read_is_not_read_and_then_cut() -> None:
    """Answers fill the socket and the transport; then reading stops, and memory with it."""
    limits = Limits(stall_seconds=0.0)
    wide = frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: (1 << 31) - 1})
    async with serving(limits) as served, connected(served.port, wide) as client:
        client.send(frames.window_update(0, (1 << 31) - 1 - 65_535), headers(1))
        (connection,) = served.server.connections
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]

        async def gone() -> bool:
            if client.writer.transport.get_write_buffer_size() < 1 << 20:
                client.send(*[message(1, bytes(10_000))] * 100)
            waits = connection._transport.get_write_buffer_size()
            # The limit, and the answers to what one read event may bring.
            assert waits < 3 << 20
            return not served.server.connections

        await until(gone)


async def test_thousands_of_resets_leave_nothing() -> None:
    """Clients that leave at random moments: no call, stream or handler stays in memory."""
    random = Random(7)
    async with serving() as served, connected(served.port) as client:
        stream = 1
        client.send(frames.window_update(0, 1 << 30))
        for _ in range(100):
            for _ in range(50):
                parts = [headers(stream)]
                parts += [message(stream, bytes(random.randrange(2000)))] * random.randrange(3)
                rst = frames.rst_stream(stream, ErrorCode.CANCEL)
                parts += random.choice([[rst], [rst[:5], rst[5:]], [data(stream, end=True)]])
                # Cut anywhere, so that resets come in read events of their own, too.
                wire = b"".join(parts)
                cut = random.randrange(len(wire))
                client.send(wire[:cut])
                client.send(wire[cut:])
                stream += 2
            client.send(ping())
            await client.until(FrameType.PING)
        (connection,) = served.server.connections
        assert connection._session is not None
        assert not connection._session.calls
        assert not connection._session.connection.streams
        # At once, not by the garbage collector: nothing of a finished call refers to itself.
        gc.disable()
        try:
            before = len(alive)
            client.send(headers(stream), message(stream, b"hi"), frames.rst_stream(stream, 8))
            client.send(headers(stream + 2), message(stream + 2, b"hi", end=True), ping())
            await client.until(FrameType.PING)
            assert len(alive) == before
        finally:
            gc.enable()
        gc.collect()
        assert len(alive) == 0
    gc.collect()
    # By type: isinstance asks objects of other tests for their class, and some answer by a warning.
    assert not any(type(each) is Call for each in gc.get_objects())


@pytest.mark.interpreted
def test_others_have_their_turn_between_large_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On libuv, which would read all that has come at once."""
    turns: list[int] = []
    receive, turn = GrpcSession.receive, 0

    def record(session: GrpcSession, data: bytes, now: float) -> None:
        if len(data) >= 1 << 16:
            turns.append(turn)
        receive(session, data, now)

    async def run() -> None:
        nonlocal turn
        async with serving() as served:
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.setblocking(False)
                client.send(START + headers(1) + data(1, (1 << 22).to_bytes(5, "big")))
                with suppress(BlockingIOError):
                    for _ in range(200):
                        client.send(data(1, bytes(16_000)))
                async with asyncio.timeout(20):
                    while len(turns) < 3:
                        await asyncio.sleep(0)
                        turn += 1

    monkeypatch.setattr(GrpcSession, "receive", record)
    uvloop.run(run())
    assert len({*turns}) == len(turns)
