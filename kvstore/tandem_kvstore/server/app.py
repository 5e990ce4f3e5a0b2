"""The HTTP server of `tandem store`: objects by path, each namespace a directory.

    GET    /{namespace}/{name}     200, or 206 with Range; 404
    HEAD   /{namespace}/{name}
    PUT    /{namespace}/{name}     201; If-None-Match: * and If-Match: TAG → 412;
                                   408 after `body_timeout`; 413; 415; 507; 501
    DELETE /{namespace}/{name}     204
    GET    /{namespace}/?list      one JSON object a line: name, size, modified
    GET    /healthz                200

An object becomes visible as a whole. The server has no access control: run it in a network that
only engines reach.
"""

import asyncio
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from tandem_contract.body_coding import ACCEPTED, CONTENT_ENCODING, REFUSED_MESSAGE, is_coded
from tandem_contract.commandline import HostPort
from tandem_contract.web_connections import read_piece

from ..errors import ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreFull
from ..stores.base import ObjectInfo
from ..stores.files import FileStore, write_all
from .capacity import Capacity

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}", re.ASCII)
_MAX_SEGMENTS: Final = 16
_LISTEN: Final = HostPort("0.0.0.0", 8080)
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER on, with no time: closing the socket resets the connection."""


class Conditions(StrEnum):
    """What the server does with If-None-Match and If-Match of a PUT."""

    CHECK = "check"
    REFUSE = "refuse"
    """Answer 501, as S3 stores that do not implement these headers."""
    IGNORE = "ignore"
    """Write in any case, as web servers that do not know these headers for PUT."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of `tandem store`."""

    directory: Path
    listen: HostPort = _LISTEN
    """Address to listen on."""
    max_object_bytes: int = 1 << 30
    """Bytes of one object. Too low: chunks of large models are refused with 413."""
    capacity_bytes: int = 100 << 30
    """Bytes of all objects. Above it the least recently used chunks are removed."""
    max_age: float | None = None
    """Seconds after which an unused chunk is removed; None: chunks are only removed for space."""
    max_uploads: int = 64
    """Uploads at once; more wait. Each keeps at most 256 KiB in memory."""
    max_connections: int = 1024
    """Clients connected at once; a further one gets the place of one that is idle or sends its
    object too slowly, else it waits in the kernel's backlog. An engine opens up to 64. Higher: more
    memory and open files."""
    idle_timeout: float = 60.0
    """Seconds without a byte, sent or received, after which a connection is closed. Shorter than
    the 15 s for which engines keep idle connections: they often send requests on closed ones."""
    body_timeout: float = 300.0
    """Seconds that the body of an upload or a download may take. Shorter: slow links fail. Longer:
    slow clients keep others waiting, and the space that their uploads are to take."""
    drain_timeout: float = 20.0
    """Seconds that running requests get at SIGTERM. Longer than the grace of the pod, 30 s in
    Kubernetes: the process is killed before."""
    conditions: Conditions = Conditions.CHECK
    """Other values are for tests of engines: the server then has no conditional writes."""


class StoreServer:
    """The handlers of one server, and the task that keeps its size within the limits."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self.capacity = Capacity(settings.directory, settings.capacity_bytes, settings.max_age)
        self._uploads = asyncio.Semaphore(settings.max_uploads)

    def app(self) -> web.Application:
        """The application. Bodies are streamed to the disk: aiohttp's own limit does not apply."""
        app = web.Application(client_max_size=0)
        app.router.add_get("/healthz", _healthz)
        app.router.add_get("/{path:.+}", self._get)
        app.router.add_put("/{path:.+}", self._put)
        app.router.add_delete("/{path:.+}", self._delete)
        app.cleanup_ctx.append(self._sweeping)
        return app

    async def _sweeping(self, _: web.Application) -> AsyncIterator[None]:
        await asyncio.to_thread(self.capacity.scan)
        task = asyncio.create_task(self.capacity.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        if path.endswith("/") and request.query_string == "list":
            return await self._list(request, path.rstrip("/"))
        store, name = self._object(path)
        file = store.directory / name
        if not await asyncio.to_thread(file.is_file):
            raise web.HTTPNotFound
        # A collector's look is no use.
        if request.method != "HEAD":
            self.capacity.touch(file, time.time())
        return _Download(file, self._settings.body_timeout)

    async def _put(self, request: web.Request) -> web.Response:
        store, name = self._object(request.match_info["path"])
        condition = self._condition(request)
        if any(map(is_coded, request.headers.getall(CONTENT_ENCODING, ()))):
            raise web.HTTPUnsupportedMediaType(headers=dict((ACCEPTED,)), text=REFUSED_MESSAGE)
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired
        if size > min(self._settings.max_object_bytes, self.capacity.limit):
            raise web.HTTPRequestEntityTooLarge(
                min(self._settings.max_object_bytes, self.capacity.limit), size
            )
        if not await self.capacity.make_room(size):
            raise _InsufficientStorage
        async with self._uploads:
            try:
                is_new = await self._receive(request, store, name, size, condition)
            finally:
                self.capacity.release(size)
        return web.Response(status=201 if is_new else 204)

    async def _receive(
        self,
        request: web.Request,
        store: FileStore,
        name: str,
        size: int,
        condition: tuple[bool, str | None],
    ) -> bool:
        target = store.directory / name
        idle = self._settings.idle_timeout
        ends = asyncio.get_running_loop().time() + self._settings.body_timeout
        try:
            file = await asyncio.to_thread(store.new_temporary)
        except StoreError as err:
            raise _http_error(err) from err
        try:
            with file.open("wb", buffering=0) as stream:
                received = 0
                while piece := await read_piece(request, idle, ends):
                    received += len(piece)
                    await asyncio.to_thread(write_all, stream, piece)
            if received != size:
                raise web.HTTPBadRequest(text="the body is shorter than Content-Length")
            existed = target.exists()
            await asyncio.to_thread(store.publish, file, name, *condition)
        except ObjectMissing as err:
            # No object has the tag; without a tag, the directory was removed during the upload.
            kind = web.HTTPPreconditionFailed if condition[1] else web.HTTPInternalServerError
            raise kind from err
        except StoreError as err:
            raise _http_error(err) from err
        except TimeoutError as err:
            raise web.HTTPRequestTimeout from err
        except OSError as err:
            raise _InsufficientStorage from err
        finally:
            with suppress(OSError):
                file.unlink()
        self.capacity.add(target, size, time.time())
        return not existed

    async def _delete(self, request: web.Request) -> web.Response:
        store, name = self._object(request.match_info["path"])
        await asyncio.to_thread(store.remove, name)
        self.capacity.forget(store.directory / name)
        return web.Response(status=204)

    async def _list(self, request: web.Request, namespace: str) -> web.StreamResponse:
        store = FileStore(self._directory(namespace.split("/")))
        try:
            entries = await asyncio.to_thread(store.entries)
        except StoreError as err:
            raise _http_error(err) from err
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        # aiohttp logs an error that a handler raises, but not that its client has left.
        with suppress(ConnectionError):
            await self._send_list(request, answer, entries)
        return answer

    async def _send_list(
        self, request: web.Request, answer: web.StreamResponse, entries: Sequence[ObjectInfo]
    ) -> None:
        async with _cut_after(self._settings.body_timeout, request):
            await answer.prepare(request)
            for start in range(0, len(entries), 1000):
                lines = (msgspec.json.encode(entry) for entry in entries[start : start + 1000])
                await answer.write(b"".join(line + b"\n" for line in lines))
            await answer.write_eof()

    def _condition(self, request: web.Request) -> tuple[bool, str | None]:
        """Whether the write has a condition, and the tag that the present object must have; None:
        there must be no object."""
        is_new, tag = request.headers.get("If-None-Match") == "*", request.headers.get("If-Match")
        if self._settings.conditions is Conditions.IGNORE or not (is_new or tag):
            return False, None
        if self._settings.conditions is Conditions.REFUSE:
            raise web.HTTPNotImplemented(text="this store has no conditional writes")
        return True, None if is_new else tag

    def _object(self, path: str) -> tuple[FileStore, str]:
        *namespace, name = path.split("/")
        if not namespace or not _SEGMENT.fullmatch(name):
            raise web.HTTPBadRequest(text="write /{namespace}/{name}")
        return FileStore(self._directory(namespace)), name

    def _directory(self, segments: list[str]) -> Path:
        # A segment `..` or with a slash could name a place outside of the directory.
        if len(segments) > _MAX_SEGMENTS or not all(map(_SEGMENT.fullmatch, segments)):
            raise web.HTTPBadRequest(
                text="a namespace has at most 16 segments of A-Z a-z 0-9 . _ -"
            )
        return self._settings.directory.joinpath(*segments)


class _Download(web.FileResponse):
    """A file that is sent within some seconds. aiohttp has sendfile, Range, ETag and If-Range."""

    def __init__(self, file: Path, seconds: float) -> None:
        super().__init__(file, chunk_size=1 << 18)
        self._seconds = seconds

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        async with _cut_after(self._seconds, request):
            return await super().prepare(request)


@asynccontextmanager
async def _cut_after(seconds: float, request: web.BaseRequest) -> AsyncIterator[None]:
    """Cut the connection if its client does not take an answer within `seconds`.

    Raises ConnectionResetError then, and when the kernel has ended the connection.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as err:
        if (transport := request.transport) is not None:
            # Reset it: otherwise the kernel keeps what this client does not take.
            client = transport.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()
        raise ConnectionResetError("the client did not take the answer in time") from err


class _InsufficientStorage(web.HTTPServerError):
    status_code = 507


def _http_error(err: StoreError) -> web.HTTPException:
    if isinstance(err, ObjectExists):
        return web.HTTPPreconditionFailed()
    if isinstance(err, StoreFull):
        return _InsufficientStorage()
    if isinstance(err, StoreDenied):
        return web.HTTPForbidden()
    return web.HTTPInternalServerError()


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")
