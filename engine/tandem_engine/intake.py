"""How many requests the server takes at once, and how much memory and time their bodies may take.

A request waits in the engine for as long as others keep it busy, and its body with it. So both are
counted from the first byte of a body until the answer has ended.

Errors: `ApiError` 408, 413, 503.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Final

from aiohttp import web

from tandem_contract.headers import RETRY_AFTER
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.web_connections import read_piece

from .body import ApiError

CONNECTIONS: Final = 4096
"""Clients connected at once; a further one gets the place of one that the server waits for
(`tandem_contract.connections`)."""
REQUESTS: Final = CONNECTIONS // 2
"""Requests with a body at once, running or waiting. Fewer than connections, so that health checks
and scrapes find a place."""
BODY: Final = web.RequestKey("body", bytes)
"""Key of a request under which handlers find its body."""
IDLE_SECONDS: Final = 60.0
"""Seconds without a byte of a body."""
BODY_SECONDS: Final = 300.0
"""Seconds that a body may take. Shorter: slow links fail; longer: slow clients keep others out."""


class Intake:
    """The requests of all clients."""

    def __init__(self, body_limit: int, held: HeldBytes) -> None:
        """`body_limit`: bytes of one body. `held` counts the bodies of all requests."""
        self._body_limit, self._held = body_limit, held
        self._requests = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body of `request`, which is counted until the block ends. Raises ApiError."""
        if self._requests >= REQUESTS:
            raise _busy("the engine has as many requests as it takes")
        buffer = BytesIO()
        self._requests += 1
        try:
            await self._receive(request, buffer)
            # The buffer's own bytes, not a copy of them.
            yield buffer.getvalue()
        finally:
            self._requests -= 1
            self._held.give_back(buffer.tell())

    async def _receive(self, request: web.Request, buffer: BytesIO) -> None:
        """Add the body to `buffer`, whose bytes are counted. Raises ApiError."""
        length = request.content_length or 0
        ends = asyncio.get_running_loop().time() + BODY_SECONDS
        self._check(length)
        while piece := await _next_piece(request, ends):
            size = buffer.tell() + len(piece)
            self._check(size)
            if not self._held.take(len(piece), of=max(size, length)):
                raise _busy("the requests of all clients take too much memory")
            buffer.write(piece)

    def _check(self, size: int) -> None:
        if size > self._body_limit:
            raise ApiError(413, f"the request body is larger than {self._body_limit} bytes")


async def _next_piece(request: web.Request, ends: float) -> bytes:
    try:
        return await read_piece(request, IDLE_SECONDS, ends)
    except TimeoutError as err:
        raise ApiError(408, "the request body did not arrive in time") from err


def _busy(problem: str) -> ApiError:
    return ApiError(503, f"{problem}: try again", headers={RETRY_AFTER: "1"})
