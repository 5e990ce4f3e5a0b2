"""HTTP connections against servers that frame their responses in every way, right and wrong."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from socket import SHUT_WR, SO_LINGER, SOL_SOCKET, socket
from time import monotonic
from typing import Any

import pytest
import uvloop

from tandem_loadtest.client.http import MAX_HEAD, MAX_IDLE, Connection, Ending, Pool

from .raw import HandServer, Peer, Serve, always, chunked, once, raw_server, whole

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
WHOLE = whole(b"answer")
CHUNKED = chunked(b"ans", b"wer")
CLOSED = b"HTTP/1.1 200 OK\r\n\r\nanswer"


class Received:
    """A receiver that keeps everything, or refuses it."""

    def __init__(self, refuse: str = "") -> None:
        self.status = 0
        self.fields: Mapping[bytes, bytes] = {}
        self.body = b""
        self.times: list[float] = []
        self._refuse = refuse

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        self.status, self.fields = status, fields

    def data(self, data: bytes, now: float) -> None:
        self.body += data
        self.times.append(now)
        if self._refuse:
            raise ValueError(self._refuse)


async def exchange(pool: Pool, receiver: Received, timeout: float = 30.0) -> Ending:
    connection = pool.take(monotonic()) or await pool.connect()
    return await connection.exchange(REQUEST, receiver, timeout)


def pool_of(url: str) -> Pool:
    host, _, port = url.removeprefix("http://").partition(":")
    return Pool(host, int(port), None)


async def received(serve: Serve, receiver: Received, timeout: float = 30.0) -> Ending:
    async with raw_server(serve) as url:
        pool = pool_of(url)
        try:
            return await exchange(pool, receiver, timeout)
        finally:
            await pool.close()


@pytest.mark.parametrize(
    "response",
    [
        WHOLE,
        CHUNKED,
        CLOSED,
        b"HTTP/1.0 200 OK\r\n\r\nanswer",
        b"HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\n" + WHOLE,
        CHUNKED.replace(b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"),
    ],
    ids=["content-length", "chunked", "close", "http-1.0", "interim", "trailers"],
)
async def test_a_whole_response_is_complete_however_it_is_framed(response: bytes) -> None:
    receiver = Received()
    ending = await received(once(response), receiver)
    assert ending == Ending(ending.at)
    assert (receiver.status, receiver.body) == (200, b"answer")
    assert b"x-a" not in receiver.fields
    assert b"x-trailer" not in receiver.fields


@pytest.mark.parametrize("response", [WHOLE, CHUNKED], ids=["content-length", "chunked"])
async def test_a_response_cut_anywhere_is_lost(response: bytes) -> None:
    for length in range(len(response)):
        receiver = Received()
        ending = await received(once(response[:length]), receiver)
        assert ending.lost is not None, length
        assert ending.lost.startswith("the server closed the connection, before")
        assert b"answer".startswith(receiver.body)


async def test_a_response_that_ends_with_the_connection_is_lost_only_in_its_head() -> None:
    for length in range(len(CLOSED)):
        ending = await received(once(CLOSED[:length]), Received())
        assert (ending.lost is None) == (length >= CLOSED.index(b"answer")), length


@pytest.mark.parametrize("response", [WHOLE[:-1], CHUNKED[:-1], CLOSED, b""])
async def test_a_reset_is_lost(response: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        # A reset drops what is still in the buffers: only after these bytes have arrived.
        await peer.send_alone(response)
        await arrived.wait()
        peer.reset()

    class Arriving(Received):
        def data(self, data: bytes, now: float) -> None:
            super().data(data, now)
            arrived.set()

    arrived = asyncio.Event()
    if not response:
        arrived.set()
    ending = await received(serve, Arriving())
    assert ending.lost is not None


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"nonsense\r\n\r\n", "not an HTTP response"),
        (b"HTTP/2 200 OK\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", "not an HTTP"),
        (CHUNKED.replace(b"3\r\nwer", b"z\r\nwer"), "not an HTTP response"),
        (b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * 2 * MAX_HEAD, "exceeds 64 KiB"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-many: a\r\n" * MAX_HEAD, "exceeds 64 KiB"),
    ],
)
async def test_a_response_that_is_not_http_is_refused(response: bytes, reason: str) -> None:
    ending = await received(once(response), Received())
    assert reason in str(ending.refused)


async def test_a_receiver_can_refuse_a_response() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(CLOSED)
        await peer.end()

    ending = await received(serve, Received("too much"))
    assert ending == Ending(ending.at, refused="too much")


async def test_connections_are_used_again() -> None:
    connections: list[int] = []

    async def serve(peer: Peer) -> None:
        connections.append(peer.index)
        await always(WHOLE)(peer)

    async with raw_server(serve) as url:
        pool = pool_of(url)
        for _ in range(3):
            receiver = Received()
            await exchange(pool, receiver)
            assert receiver.body == b"answer"
        assert connections == [0]
        await asyncio.gather(*(exchange(pool, Received()) for _ in range(3)))
        assert connections == [0, 1, 2]
        await pool.close()


@pytest.mark.parametrize(
    "response",
    [
        whole(b"answer", "connection: close"),
        whole(b"answer", "connection: close") + b"more",
        WHOLE + b"more",
        WHOLE + WHOLE,
        b"HTTP/1.0 200 OK\r\ncontent-length: 6\r\n\r\nanswer",
    ],
)
async def test_a_connection_that_ends_or_has_surplus_bytes_is_not_used_again(
    response: bytes,
) -> None:
    connections: list[int] = []

    async def serve(peer: Peer) -> None:
        connections.append(peer.index)
        await always(response)(peer)

    async with raw_server(serve) as url:
        pool = pool_of(url)
        for _ in range(2):
            receiver = Received()
            ending = await exchange(pool, receiver)
            assert ending == Ending(ending.at)
            assert receiver.body == b"answer"
        assert connections == [0, 1]
        await pool.close()


async def test_a_connection_that_the_server_closes_while_idle_is_not_used_again() -> None:
    async with raw_server(once(WHOLE)) as url:
        pool = pool_of(url)
        connection = await pool.connect()
        await connection.exchange(REQUEST, Received(), 30.0)
        await connection.closed
        assert pool.take(monotonic()) is None
        await pool.close()


async def test_unasked_bytes_close_an_idle_connection() -> None:
    more = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(WHOLE)
        await more.wait()
        peer.send(WHOLE)
        await peer.end()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        connection = await pool.connect()
        await connection.exchange(REQUEST, Received(), 30.0)
        more.set()
        await connection.closed
        assert pool.take(monotonic()) is None
        await pool.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("size", [0, 8 << 20])
def test_a_request_to_a_connection_that_the_server_had_closed_is_unread(
    run: Callable[[Coroutine[Any, Any, Ending]], Ending], size: int
) -> None:
    async def ending() -> Ending:
        async with idle_connection() as (connection, peer):
            peer.close()
            return await connection.exchange(REQUEST + bytes(size), Received(), 30.0)

    result = run(ending())
    assert result.lost is not None
    assert result.is_unread


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(
    ("response", "reset"), [(b"", False), (b"", True), (b"H", False)], ids=["", "reset", "answer"]
)
def test_a_request_that_the_server_took_is_not_unread(
    run: Callable[[Coroutine[Any, Any, Ending]], Ending], response: bytes, reset: bool
) -> None:
    async def ending() -> Ending:
        async with idle_connection() as (connection, peer):
            task = asyncio.create_task(connection.exchange(REQUEST, Received(), 30.0))
            await asyncio.get_running_loop().sock_recv(peer, len(REQUEST))
            peer.send(response)
            if reset:
                peer.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            return await task

    result = run(ending())
    assert result.lost is not None
    assert not result.is_unread


async def test_a_request_that_the_server_took_in_part_is_not_unread() -> None:
    async with idle_connection() as (connection, peer):
        large = REQUEST + bytes(64 << 20)
        task = asyncio.create_task(connection.exchange(large, Received(), 30.0))
        await asyncio.get_running_loop().sock_recv(peer, len(REQUEST))
        peer.shutdown(SHUT_WR)
        ending = await task
    assert ending.lost is not None
    assert not ending.is_unread


async def test_a_request_to_a_new_connection_is_not_unread() -> None:
    assert not (await received(once(b""), Received())).is_unread


@asynccontextmanager
async def idle_connection() -> AsyncIterator[tuple[Connection, socket]]:
    """A connection after its first response, and the server's socket."""
    with HandServer() as server:
        pool = pool_of(server.url)
        connection = await pool.connect()
        task = asyncio.create_task(connection.exchange(REQUEST, Received(), 30.0))
        with await server.accept() as peer:
            await server.answer(peer, WHOLE)
            await task
            yield connection, peer
            await pool.close()


async def test_a_connection_that_was_idle_for_long_is_closed() -> None:
    closed = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await always(WHOLE)(peer)
        closed.set()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        connection = await pool.connect()
        ending = await connection.exchange(REQUEST, Received(), 30.0)
        assert pool.take(ending.at + MAX_IDLE) is None
        await closed.wait()
        await pool.close()


@pytest.mark.parametrize("response", [b"", WHOLE[:-1]])
async def test_a_timeout_closes_the_connection(response: bytes) -> None:
    closed = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(response)
        await peer.end()
        closed.set()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        ending = await exchange(pool, Received(), 0.05)
        assert ending == Ending(ending.at, timed_out=True)
        await closed.wait()
        await pool.close()


async def test_cancelling_closes_the_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.end()
        closed.set()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        task = asyncio.create_task(exchange(pool, Received()))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()
        await pool.close()


async def test_closing_the_pool_ends_exchanges() -> None:
    asked = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.end()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        task = asyncio.create_task(exchange(pool, Received()))
        await asked.wait()
        await pool.close()
        assert (await task).lost


async def test_an_early_answer_to_a_large_request_does_not_spoil_the_next() -> None:
    async def serve(peer: Peer) -> None:
        peer.send(WHOLE)
        await peer.end()

    async with raw_server(serve) as url:
        pool = pool_of(url)
        connection = await pool.connect()
        large = REQUEST + b" " * (64 << 20)
        ending = await connection.exchange(large, Received(), 30.0)
        assert ending.lost is None
        assert pool.take(monotonic()) is None
        await pool.close()
