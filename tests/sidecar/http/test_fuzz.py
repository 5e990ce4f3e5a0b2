"""Random bytes from either side: no exception escapes, no connection or call stays open."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.client import Limits
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool

from .serving import ReceivedRequest, serving

REQUESTS = (
    b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
    b"2;a=b\r\nhi\r\n0\r\nx: trailer\r\n\r\n"
    b"GET /w HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    b"GET /y HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
)
ANSWERS = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
)
PIECES = st.lists(st.binary(max_size=8) | st.integers(0, 40), max_size=12)


def mutated(data: bytes, changes: list[bytes | int]) -> bytes:
    """`data` with random bytes inserted and others removed."""
    step, parts, at = max(1, len(data) // (len(changes) + 1)), [], 0
    for change in changes:
        parts.append(data[at : at + step])
        at += step
        if isinstance(change, int):
            at += change
        else:
            parts.append(change)
    return b"".join([*parts, data[at:]])


def watched() -> list[dict[str, Any]]:
    """The list of exceptions that the event loop reports from now on."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    return complaints


@given(PIECES)
@settings(deadline=None, max_examples=60)
def test_clients_may_send_anything(changes: list[bytes | int]) -> None:
    async def run() -> None:
        complaints = watched()
        async with serving(Limits(body=1000, head=500), ReceivedRequest.answer) as service:
            reader, writer = await asyncio.open_connection(*service.address)
            writer.write(mutated(REQUESTS, changes))
            writer.write_eof()
            async with asyncio.timeout(10):
                await service.server.closed()
                assert (await reader.read())[:9] in (b"", b"HTTP/1.1 ")
            writer.close()
            assert not service.server.clients.unsent
        assert complaints == []

    asyncio.run(run())


@given(PIECES, st.booleans())
@settings(deadline=None, max_examples=60)
def test_engines_may_answer_anything(changes: list[bytes | int], aborted: bool) -> None:
    async def run() -> None:
        complaints = watched()
        disconnect = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(mutated(ANSWERS, changes))
            writer.transport.abort() if aborted else writer.close()
            disconnect.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = HostPort(*server.sockets[0].getsockname())
        results: list[Answer | NoAnswer] = []
        pool, done = Pool(), asyncio.Event()

        def report(result: Answer | NoAnswer) -> None:
            results.append(result)
            done.set()

        request = request_bytes(b"GET", b"/", [(b"host", b"x")], b"")
        pool.send(address, b"GET", request, Collector(report))
        async with asyncio.timeout(10):
            await done.wait()
            await disconnect.wait()
        assert len(results) == 1
        pool.close()
        server.close()
        assert complaints == []

    asyncio.run(run())
