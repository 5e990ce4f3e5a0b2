"""Takes all places of a server, and asks whether a newcomer is served."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

IDLE: Final = b""
SLOW_HEAD: Final = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
SLOW_BODY: Final = b"PUT /ns/a HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nx"


@dataclass(frozen=True)
class Server:
    """A server, how many places it has, and a page that it answers."""

    port: int
    places: int = 3
    path: str = "/healthz"


async def serves_newcomers(server: Server, begin: bytes = IDLE) -> bool:
    """Connect as often as there are places, send `begin` each time, and wait until another client
    is answered."""
    async with AsyncExitStack() as stack:
        for _ in range(server.places):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            writer.write(begin)
        async with asyncio.timeout(60):
            while not await _is_answered(server):
                pass
    return True


async def _is_answered(server: Server) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(f"GET {server.path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"HTTP/1.1 " in await reader.readline()
    except ConnectionError:
        return False
    finally:
        writer.close()
