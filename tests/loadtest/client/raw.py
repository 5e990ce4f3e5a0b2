"""A server that writes raw bytes, to answer as no HTTP library would."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from socket import SO_LINGER, SOL_SOCKET, create_server, socket

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's side of one connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, index: int
    ) -> None:
        self._reader, self._writer = reader, writer
        self.index = index
        """Number of connections before this one."""

    async def request(self) -> bytes | None:
        """The next request, head and body; None at the end of the connection."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await self._reader.readexactly(length)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def send_alone(self, data: bytes) -> None:
        """Send without joining the bytes with earlier ones in the sender's buffer."""
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        transport_socket = self._writer.get_extra_info("socket")
        # Closing without lingering is what makes the kernel send a reset.
        transport_socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def end(self) -> None:
        """Wait until the client closes the connection."""
        with suppress(ConnectionError):
            await self._reader.read()


class HandServer:
    """A server whose test accepts, reads, writes and closes; nothing happens by itself.

    A socket that the test closes is closed before the client's event loop can notice.
    """

    def __init__(self) -> None:
        self._socket = create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> "HandServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def accept(self) -> socket:
        """The next connection."""
        return (await asyncio.get_running_loop().sock_accept(self._socket))[0]

    async def answer(self, connection: socket, response: bytes) -> None:
        """Read a request and write `response`."""
        await self.read_request(connection)
        await asyncio.get_running_loop().sock_sendall(connection, response)

    async def read_request(self, connection: socket) -> None:
        """Read a request, which must be small, up to its end."""
        data = b""
        while not data.endswith(b"}"):
            data += await asyncio.get_running_loop().sock_recv(connection, 1 << 16)

    async def answer_next(self, response: bytes) -> None:
        """Accept a connection, answer its first request, and close it."""
        with await self.accept() as connection:
            await self.answer(connection, response)


@asynccontextmanager
async def raw_server(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The URL of a server that runs `serve` for each connection, then closes it."""
    tasks: set[asyncio.Task[None]] = set()
    count = 0

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        # Cancelled below when the test ends; asyncio would log it as an error.
        with suppress(asyncio.CancelledError):
            await serve(Peer(reader, writer, count - 1))
        tasks.discard(task)
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls)
    try:
        scheme = "https" if tls else "http"
        yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def once(response: bytes, *, reset: bool = False) -> Serve:
    """Answer the first request of each connection with these bytes, then end the connection."""

    async def serve(peer: Peer) -> None:
        if await peer.request() is not None:
            await peer.send_alone(response)
            if reset:
                peer.reset()

    return serve


def always(response: bytes) -> Serve:
    """Answer every request with these bytes."""

    async def serve(peer: Peer) -> None:
        while await peer.request() is not None:
            peer.send(response)

    return serve


def whole(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    """A response with `content-length`."""
    return _head(status, f"content-length: {len(body)}", *fields) + body


def chunked(*parts: bytes, fields: tuple[str, ...] = ("content-type: text/event-stream",)) -> bytes:
    """A response in chunked coding."""
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return _head("200 OK", "transfer-encoding: chunked", *fields) + body + b"0\r\n\r\n"


def _head(status: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()
