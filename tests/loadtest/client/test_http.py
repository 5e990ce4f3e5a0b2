"""HTTP connections against servers that frame their responses in every way, right and wrong."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from socket import SHUT_WR, SO_LINGER, SOL_SOCKET, socket
from typing import Any

import pytest
import uvloop

from tandem_http1.connection import MAX_HEAD
from tandem_loadtest.client.http import Ending, Requester

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


def requester_of(url: str) -> Requester:
    host, _, port = url.removeprefix("http://").partition(":")
    return Requester(host, int(port), None)


async def received(serve: Serve, receiver: Received, timeout: float = 30.0) -> Ending:
    async with raw_server(serve) as url:
        requester = requester_of(url)
        try:
            return await requester.send(REQUEST, receiver, timeout)
        finally:
            await requester.close()


def is_whole(ending: Ending) -> bool:
    return ending == Ending(ending.at, ending.sent)


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
    assert is_whole(ending)
    assert (receiver.status, receiver.body) == (200, b"answer")
    assert b"x-a" not in receiver.fields
    assert b"x-trailer" not in receiver.fields


@pytest.mark.parametrize("response", [WHOLE, CHUNKED], ids=["content-length", "chunked"])
async def test_a_response_cut_anywhere_is_lost(response: bytes) -> None:
    for length in range(len(response)):
        receiver = Received()
        ending = await received(once(response[:length]), receiver)
        assert ending.lost is not None, length
        assert ending.lost.endswith("the connection ended before the answer did")
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
        (b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", "switched protocols"),
        (b"HTTP/1.1 200 OK\r\nx-long: " + b"a" * 2 * MAX_HEAD, f"longer than {MAX_HEAD} bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-many: a\r\n" * MAX_HEAD, f"longer than {MAX_HEAD} bytes"),
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
    assert ending == Ending(ending.at, ending.sent, refused="too much")


async def test_connections_are_used_again() -> None:
    connections: list[int] = []

    async def serve(peer: Peer) -> None:
        connections.append(peer.index)
        await always(WHOLE)(peer)

    async with raw_server(serve) as url:
        requester = requester_of(url)
        for _ in range(3):
            receiver = Received()
            await requester.send(REQUEST, receiver, 30.0)
            assert receiver.body == b"answer"
        assert connections == [0]
        await asyncio.gather(*(requester.send(REQUEST, Received(), 30.0) for _ in range(3)))
        assert connections == [0, 1, 2]
        await requester.close()


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
        requester = requester_of(url)
        for _ in range(2):
            receiver = Received()
            ending = await requester.send(REQUEST, receiver, 30.0)
            assert is_whole(ending)
            assert receiver.body == b"answer"
        assert connections == [0, 1]
        await requester.close()


async def test_a_connection_that_the_server_closes_while_idle_costs_no_request() -> None:
    async with raw_server(once(WHOLE)) as url:
        requester = requester_of(url)
        for _ in range(2):
            ending = await requester.send(REQUEST, Received(), 30.0)
            assert ending == Ending(ending.at, ending.sent, ending.is_resent)
        await requester.close()


async def test_unasked_bytes_close_an_idle_connection() -> None:
    more, closed = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(WHOLE)
        await more.wait()
        peer.send(WHOLE)
        await peer.end()
        closed.set()

    async with raw_server(serve) as url:
        requester = requester_of(url)
        await requester.send(REQUEST, Received(), 30.0)
        more.set()
        await closed.wait()
        await requester.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("size", [0, 8 << 20])
def test_a_request_to_a_connection_that_the_server_had_closed_is_sent_again(
    run: Callable[[Coroutine[Any, Any, Ending]], Ending], size: int
) -> None:
    async def ending() -> Ending:
        async with idle_connection() as (requester, server, peer):
            peer.close()
            large = REQUEST[:-1] + b" " * size + b"}"
            answered = asyncio.create_task(server.answer_next(WHOLE))
            ending = await requester.send(large, Received(), 30.0)
            await answered
            return ending

    result = run(ending())
    assert result == Ending(result.at, result.sent, is_resent=True)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize(
    ("response", "reset"), [(b"", False), (b"", True), (b"H", False)], ids=["", "reset", "answer"]
)
def test_a_request_that_the_server_took_is_not_sent_again(
    run: Callable[[Coroutine[Any, Any, Ending]], Ending], response: bytes, reset: bool
) -> None:
    async def ending() -> Ending:
        async with idle_connection() as (requester, _, peer):
            task = asyncio.create_task(requester.send(REQUEST, Received(), 30.0))
            await asyncio.get_running_loop().sock_recv(peer, len(REQUEST))
            peer.send(response)
            if reset:
                peer.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            return await task

    result = run(ending())
    assert result.lost is not None
    assert not result.is_resent


async def test_a_request_that_the_server_took_in_part_is_not_sent_again() -> None:
    async with idle_connection() as (requester, _, peer):
        large = REQUEST + bytes(64 << 20)
        task = asyncio.create_task(requester.send(large, Received(), 30.0))
        await asyncio.get_running_loop().sock_recv(peer, len(REQUEST))
        peer.shutdown(SHUT_WR)
        ending = await task
    assert ending.lost is not None
    assert not ending.is_resent


async def test_a_request_to_a_new_connection_is_not_sent_again() -> None:
    ending = await received(once(b""), Received())
    assert ending.lost is not None
    assert not ending.is_resent


@asynccontextmanager
async def idle_connection() -> AsyncIterator[tuple[Requester, HandServer, socket]]:
    """A requester with a connection after its first response, the server, and its socket."""
    with HandServer() as server:
        requester = requester_of(server.url)
        task = asyncio.create_task(requester.send(REQUEST, Received(), 30.0))
        with await server.accept() as peer:
            await server.answer(peer, WHOLE)
            await task
            yield requester, server, peer
            await requester.close()


@pytest.mark.parametrize("response", [b"", WHOLE[:-1]])
async def test_a_timeout_closes_the_connection(response: bytes) -> None:
    closed = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        peer.send(response)
        await peer.end()
        closed.set()

    async with raw_server(serve) as url:
        requester = requester_of(url)
        ending = await requester.send(REQUEST, Received(), 0.05)
        assert ending == Ending(ending.at, ending.sent, timed_out=True)
        await closed.wait()
        await requester.close()


async def test_cancelling_closes_the_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.end()
        closed.set()

    async with raw_server(serve) as url:
        requester = requester_of(url)
        task = asyncio.create_task(requester.send(REQUEST, Received(), 30.0))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await closed.wait()
        await requester.close()


async def test_closing_ends_exchanges() -> None:
    asked = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        asked.set()
        await peer.end()

    async with raw_server(serve) as url:
        requester = requester_of(url)
        task = asyncio.create_task(requester.send(REQUEST, Received(), 30.0))
        await asked.wait()
        await requester.close()
        assert (await task).lost


async def test_an_early_answer_to_a_large_request_does_not_spoil_the_next() -> None:
    async def serve(peer: Peer) -> None:
        peer.send(WHOLE)
        await peer.end()

    async with raw_server(serve) as url:
        requester = requester_of(url)
        for size in (64 << 20, 0):
            ending = await requester.send(REQUEST + b" " * size, Received(), 30.0)
            assert is_whole(ending)
        await requester.close()
