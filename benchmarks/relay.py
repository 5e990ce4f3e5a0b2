"""Passes bytes on between Envoy and an EPP, and looks at none of them: what a server on uvloop
takes for each read and write, whatever it does between them.

python -m benchmarks.relay PORT EPP_PORT
"""

import asyncio
from typing import cast

import click
import uvloop


class _Side(asyncio.Protocol):
    """One of the two connections; writes to the other what it reads."""

    def __init__(self) -> None:
        self.peer: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.peer is not None:
            self.peer.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None:
            self.peer.close()


class _Accepted(_Side):
    """Envoy's side, which opens the other one and is not read before."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport is not None:
            self.transport.pause_reading()
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        transport, side = await loop.create_connection(_Side, "127.0.0.1", self._port)
        self.peer, side.peer = transport, self.transport
        if self.transport is not None:
            self.transport.resume_reading()


async def _serve(port: int, epp_port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Accepted(epp_port), "127.0.0.1", port)
    await server.serve_forever()


@click.command()
@click.argument("port", type=int)
@click.argument("epp_port", type=int)
def main(port: int, epp_port: int) -> None:
    """Relay until killed."""
    uvloop.run(_serve(port, epp_port))


if __name__ == "__main__":
    main()
