"""Requests pages of backends: their metrics, and the path of their health checks.

A busy EPP requests hundreds of pages per second from backends that it knows for hours, so pages in
clear text come by `tandem_http1`, which keeps connections and takes two fifths of aiohttp's CPU
time per page. aiohttp requests the rest: pages by TLS, those to which a backend redirects, and URLs
with what only a library should read.

Errors: `PageUnavailable`, an OSError whose message says why, and of it `NotServing`; TimeoutError.
"""

import asyncio
from functools import lru_cache
from http import HTTPStatus
from ssl import SSLContext
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Failure
from tandem_http1.deadline import Deadline
from tandem_http1.upstream import Pool

MAX_PAGE: Final = 16 << 20
"""Bytes of a page, several hundred times one of vLLM's: a backend cannot fill the memory."""
IDLE_SECONDS: Final = 15.0
"""Seconds for which a connection is kept without a request, as in aiohttp."""


class PageUnavailable(ConnectionError):
    """There is no page: no connection, a broken answer, or a status other than 2xx."""


class NotServing(PageUnavailable):
    """The backend says that it takes no requests: 503, or it refuses the connection."""


class PageClient:
    """Requests pages. At most one request runs on a connection."""

    def __init__(self) -> None:
        """To be called on the event loop."""
        self._pool = Pool(idle_seconds=IDLE_SECONDS)
        # No limit of connections: `pace` limits the scrapes, and one that hangs must not hold up
        # the others.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector)

    async def get(
        self, url: str, seconds: float, tls: SSLContext | None = None, api_key: str = ""
    ) -> bytes:
        """The page at `url`, which must come within `seconds`. `tls`: for https; None: the system's
        authorities. `api_key`: what the backend asks for; empty: nothing. Raises PageUnavailable,
        NotServing, TimeoutError."""
        async with Deadline(seconds):
            # aiohttp checks what a header may hold.
            target = _target(url) if not api_key else None
            if target is None:
                return await self._get_by_library(url, tls, api_key)
            answer = await self._request(*target)
            if answer.head.status // 100 == 3:
                return await self._get_by_library(url, tls)
        if answer.head.status // 100 != 2:
            error = _error_of(answer.head.status)
            raise error(f"status {answer.head.status}")
        return answer.body

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()
        await self._session.close()
        # The transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

    async def _request(self, address: HostPort, request: bytes) -> Answer:
        done: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()

        def take(answer: Answer | NoAnswer) -> None:
            # Done already if the scrape was cancelled in this turn of the loop.
            if not done.done():
                done.set_result(answer)

        call = self._pool.send(
            address, b"GET", request, Collector(take, limit=MAX_PAGE), connect_timeout=None
        )
        try:
            answer = await done
        finally:
            # When the scrape is cancelled or late, what comes now is of no use.
            call.abort()
        if isinstance(answer, NoAnswer):
            is_refused = answer.failure is Failure.REFUSED
            raise (NotServing if is_refused else PageUnavailable)(answer.detail)
        return answer

    async def _get_by_library(self, url: str, tls: SSLContext | None, api_key: str = "") -> bytes:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        try:
            async with self._session.get(url, ssl=tls or True, headers=headers) as response:
                response.raise_for_status()
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MAX_PAGE:
                        raise PageUnavailable(f"a page of more than {MAX_PAGE} bytes")
                return bytes(body)
        except (TimeoutError, PageUnavailable):
            raise
        except aiohttp.ClientResponseError as err:
            raise _error_of(err.status)(str(err)) from err
        except aiohttp.ClientConnectorError as err:
            is_refused = isinstance(err.os_error, ConnectionRefusedError)
            raise (NotServing if is_refused else PageUnavailable)(str(err)) from err
        except (aiohttp.ClientError, OSError) as err:
            raise PageUnavailable(str(err) or type(err).__name__) from err


def _error_of(status: int) -> type[PageUnavailable]:
    return NotServing if status == HTTPStatus.SERVICE_UNAVAILABLE else PageUnavailable


@lru_cache(4096)
def _target(url: str) -> tuple[HostPort, bytes] | None:
    """Where to connect for `url`, and the request; None: aiohttp reads this URL."""
    parts = urlsplit(url)
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    host = parts.hostname
    # Whatever needs encoding is left to the library, as are passwords.
    is_plain = (parts.netloc + path).isascii() and (parts.netloc + path).isprintable()
    if parts.scheme != "http" or not host or not is_plain or " " in url or "@" in parts.netloc:
        return None
    lines = (
        f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: text/plain;q=1, */*;q=0.5\r\n\r\n"
    )
    return HostPort(host, parts.port or 80), lines.encode()
