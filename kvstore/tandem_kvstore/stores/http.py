"""A plain HTTP store: GET, PUT and DELETE of `{endpoint}/{kv_namespace}/{name}`.

Conditional writes use If-None-Match and If-Match. A listing is `GET {kv_namespace}/?list`, which
`tandem store` answers. A server without listing must bound its contents itself.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Final

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong
from yarl import URL

from ..errors import (
    UNREADABLE,
    LocationError,
    ObjectEmpty,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    StoreUnsupported,
)
from ..format.tensors import Buffer
from ..location import StoreLocation
from .base import ObjectInfo, TaggedObject

_ERRORS: Final[dict[int, type[StoreError]]] = {
    401: StoreDenied,
    403: StoreDenied,
    404: ObjectMissing,
    405: StoreUnsupported,
    409: ObjectExists,
    412: ObjectExists,
    413: StoreFull,
    416: ObjectEmpty,
    501: StoreUnsupported,
    507: StoreFull,
}
_PIECE: Final = 1 << 18
"""Bytes of a piece of a body that is sent. Smaller: more CPU. Larger: more memory in the socket."""


class _Entry(msgspec.Struct):
    name: str
    size: int
    modified: float


class HttpStore:
    """One namespace of an HTTP server. For one event loop."""

    def __init__(self, location: StoreLocation) -> None:
        self._base = URL(f"{location.endpoint}/{location.namespace}/", encoded=True)
        self._timeout = aiohttp.ClientTimeout(
            total=location.timeout, sock_connect=location.connect_timeout
        )
        try:
            self._ssl = (
                ssl.create_default_context(cafile=location.ca_file) if location.ca_file else True
            )
        except OSError as err:
            raise LocationError(f"ca_file {location.ca_file}: {err.strerror or err}") from err
        self._session: aiohttp.ClientSession | None = None

    async def get(self, name: str, limit: int, *, is_cut: bool = False) -> Buffer:
        try:
            return (await self._get(name, limit, is_cut=is_cut)).data
        except ObjectEmpty:
            return b""

    async def get_tagged(self, name: str, limit: int) -> TaggedObject:
        return await self._get(name, limit, is_cut=False)

    async def put(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._put(name, parts, {})

    async def put_if(self, name: str, parts: Sequence[Buffer], tag: str | None) -> None:
        condition = {"If-None-Match": "*"} if tag is None else {"If-Match": tag}
        await self._put(name, parts, condition)

    async def delete(self, name: str) -> None:
        try:
            async with self._request("DELETE", name):
                pass
        except ObjectMissing:
            pass

    async def info(self, name: str) -> ObjectInfo:
        async with self._request("HEAD", name) as answer:
            try:
                modified = parsedate_to_datetime(answer.headers["Last-Modified"]).timestamp()
            except (KeyError, ValueError) as err:
                raise StoreUnsupported(f"HEAD {name}: the answer has no Last-Modified") from err
            return ObjectInfo(name, answer.content_length or 0, modified)

    async def scan(self) -> AsyncIterator[ObjectInfo]:
        async with self._request("GET", "?list") as answer:
            if answer.content_type != "application/x-ndjson":
                raise StoreUnsupported("this HTTP store has no listing: see docs/run/storage.md")
            try:
                async for line in answer.content:
                    entry = msgspec.json.decode(line, type=_Entry)
                    yield ObjectInfo(entry.name, entry.size, entry.modified)
            # The last two, by aiohttp's version: a line that is too long.
            except (*UNREADABLE, LineTooLong, ValueError) as err:
                raise StoreUnavailable("LIST: the store's answer is no listing") from err

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, name: str, limit: int, *, is_cut: bool) -> TaggedObject:
        headers = {"Range": f"bytes=0-{limit - 1}"} if is_cut else None
        async with self._request("GET", name, headers=headers) as answer:
            if (size := answer.content_length) is None:
                raise StoreUnsupported(f"GET {name}: the answer has no Content-Length")
            # A server may ignore the range and send the whole object.
            size = min(size, limit) if is_cut else size
            if size > limit:
                raise ObjectTooLarge(f"{name} has {size} bytes, at most {limit} expected")
            data = bytearray(size)
            filled = 0
            # One buffer: joining pieces at the end would take the memory twice.
            async for piece in answer.content.iter_any():
                data[filled : filled + len(piece)] = piece[: size - filled]
                filled += len(piece)
                if filled >= size:
                    break
            return TaggedObject(data, answer.headers.get("ETag"))

    async def _put(self, name: str, parts: Sequence[Buffer], headers: dict[str, str]) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        # Content-Length, not chunked: the server can refuse a large body before it is sent.
        headers = {**headers, "Content-Length": str(size)}
        async with self._request("PUT", name, data=_pieces(parts), headers=headers):
            pass

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        name: str,
        *,
        data: AsyncIterator[Buffer] | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            # Uncompressed: the length is then known, and KV does not compress.
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                headers={"Accept-Encoding": "identity"},
                connector=aiohttp.TCPConnector(limit=64, ssl=self._ssl),
                auto_decompress=False,
                read_bufsize=_PIECE,
            )
        url = self._base.with_query("list") if name == "?list" else self._base / name
        try:
            # No redirects, which could lead to a host that is not configured.
            async with self._session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                if not 200 <= answer.status < 300:
                    kind = _ERRORS.get(answer.status, StoreUnavailable)
                    raise kind(f"{method} {name}: the store answered {answer.status}")
                yield answer
        except TimeoutError as err:
            raise StoreTimeout(f"{method} {name}: no answer in time") from err
        except (aiohttp.ClientError, OSError) as err:
            raise StoreUnavailable(f"{method} {name}: {_reason(err)}") from err


def _reason(err: aiohttp.ClientError | OSError) -> str:
    """Why the store did not answer, without the error's text, which may quote headers."""
    if isinstance(err, aiohttp.ClientConnectorDNSError):
        return "the host name of the store is not known"
    if isinstance(err, aiohttp.ServerDisconnectedError):
        return "the store closed the connection"
    # The errno of a TLS error is not the system's.
    if isinstance(err, aiohttp.ClientSSLError) or not isinstance(err, OSError) or not err.errno:
        return type(err).__name__
    return f"no connection to the store: {os.strerror(err.errno)}"


async def _pieces(parts: Sequence[Buffer]) -> AsyncIterator[Buffer]:
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]
            # aiohttp waits only for a full socket; let other tasks run after each piece.
            await asyncio.sleep(0)
