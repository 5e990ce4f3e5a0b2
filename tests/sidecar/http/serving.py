"""A server alone, before a handler of the test's."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tandem_contract.commandline import HostPort
from tandem_sidecar.http.messages import Request, response_bytes
from tandem_sidecar.http.server import Client, Exchange, Limits, Server


@dataclass
class Exchanged:
    """One request handed to the test, which answers when it likes."""

    request: Request
    client: Client
    survives_half_close: bool = True
    left: asyncio.Event = field(default_factory=asyncio.Event)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, body: bytes = b"ok", *, keep: bool = True) -> None:
        self.client.write(response_bytes(200, b"", body, close=not keep))
        self.client.finish(keep=keep)

    def client_left(self) -> None:
        self.left.set()

    def client_full(self) -> None:
        self.full.set()

    def client_ready(self) -> None:
        self.full.clear()


class Handler:
    """Hands requests to the test, or answers them at once by `reply`."""

    def __init__(self, reply: Callable[[Exchanged], None] | None) -> None:
        self.requests: asyncio.Queue[Exchanged] = asyncio.Queue()
        self._reply = reply

    def handle(self, request: Request, client: Client) -> Exchange | None:
        exchanged = Exchanged(request, client)
        self.requests.put_nowait(exchanged)
        if self._reply is None:
            return exchanged
        self._reply(exchanged)
        return None


@dataclass
class Serving:
    server: Server
    handler: Handler
    address: HostPort

    async def next(self) -> Exchanged:
        """The next request a client sends."""
        async with asyncio.timeout(10):
            return await self.handler.requests.get()


@asynccontextmanager
async def serving(
    limits: Limits | None = None, reply: Callable[[Exchanged], None] | None = None
) -> AsyncIterator[Serving]:
    handler = Handler(reply)
    server = Server(handler, limits or Limits())
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
