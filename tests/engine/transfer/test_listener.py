import asyncio
from contextlib import AsyncExitStack

import pytest

from tandem_engine.transfer.listener import Connection, Listener
from tandem_engine.transfer.wire import TransferLimits

from .support import HOST, Peer, connected, until


class Sessions:
    """Serves by waiting; a peer that sends a byte is identified."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.identified: list[str] = []

    async def serve(self, connection: Connection) -> None:
        self.open.append(connection.peer)
        try:
            if await asyncio.get_running_loop().sock_recv(connection.sock, 1):
                connection.mark_identified()
                self.identified.append(connection.peer)
                await asyncio.Event().wait()
        finally:
            self.open.remove(connection.peer)


def name(peer: Peer) -> str:
    host, port = peer.sock.getsockname()
    return f"{host}:{port}"


async def test_the_oldest_unidentified_connection_is_replaced() -> None:
    sessions = Sessions()
    listener = Listener(sessions.serve, TransferLimits(connections=2))
    address = await listener.start(HOST, 0)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(connected(address))
        await first.send_bytes(b"x")
        await until(lambda: sessions.identified == [name(first)])
        second = await stack.enter_async_context(connected(address))
        await until(lambda: name(second) in sessions.open)
        third = await stack.enter_async_context(connected(address))
        await until(lambda: sessions.open == [name(first), name(third)])
        await second.ended()
        await third.send_bytes(b"x")
        await until(lambda: sessions.identified == [name(first), name(third)])
        fourth = await stack.enter_async_context(connected(address))
        await fourth.ended()
        assert sessions.open == [name(first), name(third)]
        await listener.close()
        await first.ended()
    assert sessions.open == []


async def test_an_address_that_is_not_this_machines_is_an_os_error() -> None:
    listener = Listener(Sessions().serve, TransferLimits())
    with pytest.raises(OSError, match="assign"):
        await listener.start("192.0.2.1", 0)
    await listener.close()
