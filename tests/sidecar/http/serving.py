"""An HTTP server with a handler of the test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.server_tls import ServerTls
from tandem_http1.client import ActiveRequest, ClientConnection, Limits
from tandem_http1.messages import Request, response_bytes
from tandem_http1.server import Server


@dataclass
class ReceivedRequest:
    """One request, which the test answers when it wants to."""

    request: Request
    client: ClientConnection
    survives_half_close: bool = True
    disconnect: asyncio.Event = field(default_factory=asyncio.Event)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, body: bytes = b"ok", *, keep: bool = True) -> None:
        self.client.write(response_bytes(200, b"", body, close=not keep))
        self.client.finish(keep=keep)

    def client_disconnected(self) -> None:
        self.disconnect.set()

    def pause_sending(self) -> None:
        self.full.set()

    def resume_sending(self) -> None:
        self.full.clear()


class Handler:
    """Passes requests to the test, or answers them at once by `reply`."""

    def __init__(self, reply: Callable[[ReceivedRequest], None] | None) -> None:
        self.requests: asyncio.Queue[ReceivedRequest] = asyncio.Queue()
        self._reply = reply

    def refuse(self, request: Request) -> bytes:
        return b""

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest | None:
        received = ReceivedRequest(request, client)
        self.requests.put_nowait(received)
        if self._reply is None:
            return received
        self._reply(received)
        return None


@dataclass
class Serving:
    server: Server
    handler: Handler
    address: HostPort

    async def next(self) -> ReceivedRequest:
        """The next request a client sends."""
        async with asyncio.timeout(10):
            return await self.handler.requests.get()


@asynccontextmanager
async def serving(
    limits: Limits | None = None,
    reply: Callable[[ReceivedRequest], None] | None = None,
    tls: ServerTls | None = None,
    held: HeldBytes | None = None,
) -> AsyncIterator[Serving]:
    handler = Handler(reply)
    context = None if tls is None else lambda: tls.context
    server = Server(handler, limits or Limits(), context, held)
    sock = socket.create_server(("127.0.0.1", 0))
    server.listen([sock])
    try:
        yield Serving(server, handler, HostPort(*sock.getsockname()))
    finally:
        server.stop_listening()
        server.close()
        for client in list(server.clients):
            client.abort()
        async with asyncio.timeout(10):
            await server.closed()
