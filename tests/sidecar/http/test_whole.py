"""However the engine's bytes are split and wherever they end, the client gets the complete answer
or notices that it did not.

One sidecar end runs for all examples: a server whose handler relays what a scripted engine says.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.commandline import HostPort
from tandem_http1.answers import CutPoint, EventChunks, Relay
from tandem_http1.client import ActiveRequest, ClientConnection, Limits
from tandem_http1.connection import Failure
from tandem_http1.framing import LAST_CHUNK, chunk
from tandem_http1.messages import Request, ResponseHead, request_bytes
from tandem_http1.server import Server
from tandem_http1.upstream import Pool

RESET = struct.pack("ii", 1, 0)


class Relayed:
    """One request relayed unchanged, in the way the hand-off does it."""

    survives_half_close = False

    def __init__(
        self, pool: Pool, engine: HostPort, request: Request, client: ClientConnection
    ) -> None:
        self.payload_only = request.http10
        self._client = client
        self._relay = Relay(client, request)
        self._chunks: EventChunks | None = None
        sent = request_bytes(request.method, request.target, request.headers, request.body)
        self._call = pool.send(engine, request.method, sent, self)

    def client_disconnected(self) -> None:
        self._call.abort()

    def pause_sending(self) -> None:
        self._call.pause()

    def resume_sending(self) -> None:
        self._call.resume()

    def head(self, head: ResponseHead) -> None:
        self._chunks = EventChunks(head, wire=not self.payload_only)
        self._relay.begin(head, frozenset(), b"", close=False)

    def body(self, data: bytes, last: bool) -> None:
        assert self._chunks is not None
        self._relay.body(self._chunks.take(data), last=last)

    def failed(self, failure: Failure, detail: str) -> None:
        if self._relay.written:
            at = CutPoint.WITHIN_EVENT if self._chunks is None else self._chunks.cut_point()
            self._relay.cut(502, detail, at)
        else:
            self._client.abort()


class Handler:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.engine: HostPort

    def refuse(self, request: Request) -> bytes:
        return b""

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest | None:
        return Relayed(self.pool, self.engine, request, client)


@asynccontextmanager
async def engine(pieces: list[bytes], *, reset: bool) -> AsyncIterator[HostPort]:
    """Send `pieces`, if possible one for each read of the sidecar, and end the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        raw = writer.get_extra_info("socket")
        if reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        else:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield HostPort(*server.sockets[0].getsockname())
    finally:
        server.close()


async def fetched(version: bytes, pieces: list[bytes], *, reset: bool) -> bytes | None:
    """The body that a client of HTTP `version` gets; None if it notices a truncation."""
    pool = Pool()
    handler = Handler(pool)
    server = Server(handler, Limits())
    sock = socket.create_server(("127.0.0.1", 0))
    server.listen([sock])
    async with engine(pieces, reset=reset) as handler.engine, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        writer.write(b"GET / HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
        try:
            raw: bytes | None = await reader.read()
        except ConnectionResetError:
            raw = None
        writer.close()
        server.stop_listening()
        server.close()
        await server.closed()
        pool.close()
    return raw


def complete_body(raw: bytes | None) -> bytes | None:
    """The body as a strict client reads it; None for an incomplete one."""
    head, end, body = (raw or b"").partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        return dechunked(body)
    lengths = [line for line in lines if line.startswith(b"content-length:")]
    if lengths and len(body) != int(lengths[0].split(b":")[1]):
        return None
    return body


def dechunked(body: bytes) -> bytes | None:
    whole = b""
    while True:
        size, end, body = body.partition(b"\r\n")
        if not end:
            return None
        if int(size, 16) == 0:
            return whole if body == b"\r\n" else None
        data, body = body[: int(size, 16)], body[int(size, 16) :]
        if not body.startswith(b"\r\n"):
            return None
        whole, body = whole + data, body[2:]


EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(4)] + [b"data: [DONE]\n\n"]
WHOLE = b"".join(EVENTS)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
SSE, JSON = b"text/event-stream", b"application/json"
CHUNKS = b"transfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, EVENTS)) + LAST_CHUNK
ANSWERS = {
    "sized": HEAD % JSON + b"content-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    "sized events": HEAD % SSE + b"content-length: %d\r\n\r\n" % len(WHOLE) + WHOLE,
    "chunked": HEAD % JSON + CHUNKS,
    "chunked events": HEAD % SSE + CHUNKS,
    "compressed events": HEAD % SSE + b"content-encoding: gzip\r\n" + CHUNKS,
}


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("shape", ANSWERS)
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_an_answer_cut_anywhere_is_complete_or_visibly_broken(
    shape: str, version: bytes, data: st.DataObject
) -> None:
    answer = ANSWERS[shape]
    end = data.draw(st.one_of(st.just(len(answer)), st.integers(0, len(answer) - 1)), "end")
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=6), "cuts"))
    reset = end < len(answer) and data.draw(st.booleans(), "reset")
    marks = [0, *cuts, end]
    pieces = [answer[a:b] for a, b in pairwise(marks) if a < b]
    body = complete_body(asyncio.run(fetched(version, pieces, reset=reset)))
    if end == len(answer):
        assert body == WHOLE
    else:
        assert body is None or body.count(b'data: {"error"') == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("reset", [True, False])
async def test_a_body_without_a_length_is_broken_by_a_reset(version: bytes, reset: bool) -> None:
    """Only an orderly end proves the body complete; any other end reaches the client as a reset."""
    answer = HEAD % JSON + b"\r\n" + WHOLE
    raw = await fetched(version, [answer], reset=reset)
    if reset:
        assert raw is None or raw == b""
    else:
        assert complete_body(raw) == WHOLE
