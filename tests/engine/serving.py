"""Servers of aiohttp in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem_contract.web_connections import WebConnections


@asynccontextmanager
async def listening(connections: WebConnections) -> AsyncIterator[int]:
    """Serve on a free port, and return it."""
    await connections.runner.setup()
    try:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(connections, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()
    finally:
        await connections.runner.cleanup()
