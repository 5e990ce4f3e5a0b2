"""Clients that send too much, send too slowly, or do not read their answers."""

import asyncio
import contextlib
import socket

import pytest

from tandem_contract.held_bytes import HeldBytes
from tandem_http1.client import ClientConnection, Limits
from tandem_http1.server import Server

from ..wire import wire
from .serving import Handler, ReceivedRequest, serving

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
SOON = 0.1


async def test_clients_above_the_limit_wait() -> None:
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            serving(Limits(connections=2), reply=ReceivedRequest.answer)
        )
        clients = [await stack.enter_async_context(wire(service.address)) for _ in range(5)]
        for client in clients:
            client.send(GET)
        for group in (clients[:2], clients[2:4]):
            for client in group:
                assert (await client.response()).status == 200
            assert len(service.server.clients) == 2
            for client in group:
                client.writer.close()
        assert (await clients[4].response()).status == 200


async def test_a_raised_limit_accepts_waiting_clients() -> None:
    limits = Limits(connections=1, request_seconds=SOON)
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(limits, reply=ReceivedRequest.answer))
        first, second = [await stack.enter_async_context(wire(service.address)) for _ in range(2)]
        first.send(GET)
        assert (await first.response()).status == 200
        service.server.clients.limits = Limits(connections=2)
        second.send(GET)
        assert (await second.response()).status == 200


async def test_a_slow_body_is_timed_out() -> None:
    async with serving(Limits(request_seconds=SOON)) as service, wire(service.address) as client:

        async def dribble() -> None:
            while True:
                client.send(b"x")
                await asyncio.sleep(SOON / 10)

        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        dribbling = asyncio.create_task(dribble())
        assert (await client.response()).status == 408
        dribbling.cancel()
        assert service.handler.requests.empty()


MIB = 1 << 20


@pytest.mark.parametrize("chunked", [False, True])
async def test_unfinished_uploads_are_bounded_over_all_connections(chunked: bool) -> None:
    held = HeldBytes(8 * MIB)
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(held=held))
        clients = [await stack.enter_async_context(wire(service.address)) for _ in range(16)]
        head, body = (
            (b"transfer-encoding: chunked", b"%x\r\n%b" % (MIB, bytes(MIB)))
            if chunked
            else (b"content-length: %d" % (2 * MIB), bytes(MIB))
        )
        for client in clients:
            client.send(b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (head, body))
        refusals = [asyncio.ensure_future(client.response()) for client in clients]
        async with asyncio.timeout(10):
            # An eighth of the limit is kept for small requests.
            while sum(refusal.done() for refusal in refusals) < 9:
                await asyncio.wait(
                    [refusal for refusal in refusals if not refusal.done()],
                    return_when=asyncio.FIRST_COMPLETED,
                )
        answers = [refusal.result() for refusal in refusals if refusal.done()]
        assert {answer.status for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        assert held.size <= 7 * MIB
        # Small requests pass, however many.
        small = await stack.enter_async_context(wire(service.address))
        for _ in range(50):
            small.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello")
            (await service.next()).answer()
            assert (await small.response()).status == 200
        for refusal in refusals:
            refusal.cancel()
    assert held.size == 0


@pytest.mark.parametrize("end", ["answered", "aborted", "left", "pipelined"])
async def test_a_body_is_counted_until_its_request_ends(end: str) -> None:
    held = HeldBytes(8 * MIB)
    async with serving(held=held) as service, wire(service.address) as client:
        request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" + bytes(1000)
        client.send(request)
        received = await service.next()
        assert held.size == 1000
        match end:
            case "answered":
                received.answer()
                assert (await client.response()).status == 200
            case "aborted":
                received.client.abort()
            case "left":
                received.survives_half_close = False
                client.writer.close()
                async with asyncio.timeout(10):
                    await received.disconnect.wait()
            case "pipelined":
                # The second request is read and waits.
                client.send(request)
                async with asyncio.timeout(10):
                    while held.size < 2000:
                        await asyncio.sleep(0)
                    received.client.abort()
                    await service.server.closed()
        assert held.size == 0


@pytest.mark.parametrize("keep", [True, False])
async def test_a_client_that_reads_nothing_is_disconnected(keep: bool) -> None:
    limits = Limits(stall_seconds=SOON, request_seconds=SOON)
    async with serving(limits) as service, wire(service.address) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport
        client.send(GET)
        received = await service.next()
        received.client.write(b"x" * 2**25)
        async with asyncio.timeout(10):
            await received.full.wait()
            if keep:
                await received.disconnect.wait()
            else:
                received.client.finish(keep=False)
            await service.server.closed()


class Sending(asyncio.Transport):
    """A connection to `reader` whose kernel buffers are full."""

    def __init__(self, reader: socket.socket, writer: socket.socket) -> None:
        super().__init__({"socket": writer})
        self.cut = False
        self.reader = reader
        writer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(bytes(4096))

    def get_write_buffer_size(self) -> int:
        return 10_000_000

    def is_closing(self) -> bool:
        return self.cut

    def abort(self) -> None:
        self.cut = True


async def test_a_slow_reader_is_not_taken_for_a_stalled_one() -> None:
    """Progress is seen long before the kernel asks for more data."""
    server = Server(Handler(None), Limits(stall_seconds=100))
    now = asyncio.get_running_loop().time()
    with contextlib.ExitStack() as stack:
        reader, writer = map(stack.enter_context, socket.socketpair())
        sending, client = Sending(reader, writer), ClientConnection(server.clients)
        client.connection_made(sending)
        client.pause_writing()
        assert server.clients.unsent == {client}
        for minute in range(5):
            assert len(reader.recv(4096)) == 4096
            client.check_unsent(now + 60 * minute)
            assert not sending.cut
        client.check_unsent(now + 60 * 4 + 99)
        assert not sending.cut
        client.check_unsent(now + 60 * 4 + 101)
        assert sending.cut


class UpgradedRequest(ReceivedRequest):
    ended = False

    def client_data(self, data: bytes) -> None:
        raise AssertionError(data)

    def client_eof(self) -> None:
        self.ended = True


async def test_half_closing_before_the_protocol_is_switched() -> None:
    server = Server(handler := Handler(None), Limits())
    with contextlib.ExitStack() as stack:
        reader, writer = map(stack.enter_context, socket.socketpair())
        client = ClientConnection(server.clients)
        client.connection_made(Sending(reader, writer))
        client.data_received(
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: raw\r\n\r\n"
        )
        assert client.eof_received()
        switched = UpgradedRequest((await handler.requests.get()).request, client)
        client.switch(switched)
        assert switched.ended


async def test_reading_stops_while_a_request_is_served() -> None:
    """Pipelining is bounded by one read: further requests stay in the client's buffers."""
    async with serving() as service, wire(service.address) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(10**6))
        received = await service.next()
        many = (
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + bytes(10**6)
        ) * 40
        client.send(many)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON * 2):
                await client.writer.drain()
        received.answer()
        assert (await client.response()).status == 200
        for _ in range(40):
            (await service.next()).answer()
            assert (await client.response()).status == 200


async def test_an_aborted_answer_is_a_reset_and_not_an_orderly_end() -> None:
    """A body without a length must not look complete."""
    async with serving() as service, wire(service.address) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        received = await service.next()
        received.client.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of i")
        assert await client.reader.readuntil(b"half") != b""
        received.client.abort()
        with pytest.raises(ConnectionResetError):
            await client.closed()


async def test_half_closing_after_several_requests() -> None:
    async with serving() as service, wire(service.address) as client:
        client.send(GET * 3)
        client.writer.write_eof()
        for _ in range(3):
            (await service.next()).answer()
            assert (await client.response()).status == 200
        assert await client.closed() == b""


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf"]
)
async def test_half_closing_before_a_request_is_complete(sent: bytes) -> None:
    async with serving() as service, wire(service.address) as client:
        client.send(sent)
        client.writer.write_eof()
        assert await client.closed() == b""
        async with asyncio.timeout(10):
            await service.server.closed()
        assert service.handler.requests.empty()
