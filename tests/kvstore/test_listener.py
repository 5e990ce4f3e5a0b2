"""The connections of `tandem store`: their number, clients that take no bytes, and SIGTERM."""

import asyncio
import gzip
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from tandem_kvstore.server.app import StoreSettings
from tandem_kvstore.server.listener import StoreListener
from tandem_local.ports import free_port

from ..epp.real import until
from .servers import Server, store_in_this_process, tandem_store

pytestmark = pytest.mark.component

SIZE = 16 << 20
"""Bytes of an object that does not fit into the sockets of server and client."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def large_object(directory: Path) -> None:
    """An object of SIZE zeros, which take no space."""
    (directory / "ns").mkdir()
    with (directory / "ns/large").open("wb") as file:
        file.truncate(SIZE)


@asynccontextmanager
async def connection(server: Server) -> AsyncIterator[Streams]:
    """A connection of a client that takes few bytes before it reads."""
    url = URL(server.location.endpoint)
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        await asyncio.get_running_loop().sock_connect(client, (url.host, url.port))
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def get(streams: Streams, path: str) -> bytes:
    """Send a request, and return the answer's head."""
    reader, writer = streams
    writer.write(f"GET {path} HTTP/1.1\r\nHost: store\r\n\r\n".encode())
    return await reader.readuntil(b"\r\n\r\n")


async def is_closed(server: Server) -> bool:
    """Whether the server accepts no connection."""
    try:
        async with connection(server):
            return False
    except OSError:
        return True


class Upload:
    """The body of an upload whose second part waits for `goes_on`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.goes_on = directory, asyncio.Event()

    async def send(self, server: Server) -> aiohttp.ClientResponse:
        """Send it on a connection of its own, as /ns/a. Raises aiohttp.ClientError."""
        url, length = f"{server.location.endpoint}/ns/a", {"Content-Length": "10"}
        async with (
            aiohttp.ClientSession() as http,
            http.put(url, data=self._parts(), headers=length) as answer,
        ):
            return answer

    async def _parts(self) -> AsyncIterator[bytes]:
        yield b"first"
        await self.goes_on.wait()
        yield b"later"

    async def is_received(self) -> bool:
        """Whether the server has written the first part."""
        return any(file.stat().st_size == 5 for file in self._directory.glob("ns/.tmp-*"))


async def test_requests_that_run_at_sigterm_end_and_no_more_are_accepted(tmp_path: Path) -> None:
    large_object(tmp_path)
    upload = Upload(tmp_path)
    async with (
        tandem_store(tmp_path, "--drain-timeout", "10m") as server,
        connection(server) as idle,
        connection(server) as download,
    ):
        assert b" 200 OK" in await get(idle, "/healthz")
        assert await idle[0].readexactly(3) == b"ok\n"
        assert b" 200 OK" in await get(download, "/ns/large")
        put = asyncio.create_task(upload.send(server))
        await until(upload.is_received)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert await idle[0].read() == b""
        assert await is_closed(server)
        assert server.process.returncode is None
        assert await download[0].readexactly(SIZE) == bytes(SIZE)
        assert await download[0].read() == b""
        upload.goes_on.set()
        answer = await put
        assert (answer.status, answer.headers["Connection"]) == (201, "close")
        assert await server.process.wait() == 0
    assert (tmp_path / "ns/a").read_bytes() == b"firstlater"


async def test_requests_that_take_too_long_after_sigterm_are_cut(tmp_path: Path) -> None:
    large_object(tmp_path)
    upload = Upload(tmp_path)
    async with (
        tandem_store(tmp_path, "--drain-timeout", "100ms") as server,
        connection(server) as download,
    ):
        assert b" 200 OK" in await get(download, "/ns/large")
        put = asyncio.create_task(upload.send(server))
        await until(upload.is_received)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        assert await server.process.wait() == 0
        with pytest.raises(aiohttp.ClientError):
            await put
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await download[0].readexactly(SIZE)
    assert os.listdir(tmp_path / "ns") == ["large"]


async def test_clients_beyond_the_limit_wait_for_a_place(tmp_path: Path) -> None:
    upload = Upload(tmp_path)
    async with store_in_this_process(tmp_path, max_connections=1) as server:
        put = asyncio.create_task(upload.send(server))
        await until(upload.is_received)
        async with connection(server) as waiting:
            answer = asyncio.create_task(get(waiting, "/ns/a"))
            # Without the limit it is answered during the upload, with 404.
            done, _ = await asyncio.wait({answer}, timeout=0.2)
            assert not done
            upload.goes_on.set()
            assert (await put).status == 201
            assert b" 200 OK" in await answer


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "identity, gzip", "identity; gzip"])
async def test_a_compressed_object_is_refused_and_never_inflated(
    tmp_path: Path, coding: str
) -> None:
    """Content-Length and the capacity count the bytes that come, not what they inflate to."""
    body = gzip.compress(bytes(64 << 20))
    async with (
        store_in_this_process(tmp_path, capacity_bytes=1 << 20) as server,
        aiohttp.ClientSession(auto_decompress=False) as http,
    ):
        url = f"{server.location.endpoint}/ns/a"
        headers = [("Content-Encoding", line) for line in coding.split("; ")]
        async with http.put(url, data=body, headers=headers) as answer:
            assert (answer.status, answer.headers["Accept-Encoding"]) == (415, "identity")
        async with http.get(url) as answer:
            assert answer.status == 404
        none = {"Content-Encoding": "identity, Identity"}
        async with http.put(url, data=body, headers=none) as answer:
            assert answer.status == 201
        async with http.get(url) as answer:
            assert await answer.read() == body


async def test_many_readers_at_once_are_all_served(tmp_path: Path) -> None:
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns/a").write_bytes(bytes(1 << 18))
    async with (
        store_in_this_process(tmp_path, max_connections=64) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=200)) as http,
    ):

        async def read() -> int:
            async with http.get(f"{server.location.endpoint}/ns/a") as answer:
                return len(await answer.read())

        assert await asyncio.gather(*(read() for _ in range(200))) == [1 << 18] * 200


@pytest.mark.parametrize("requests", [0, 1])
async def test_idle_connections_are_closed(tmp_path: Path, requests: int) -> None:
    async with (
        store_in_this_process(tmp_path, idle_timeout=0.1) as server,
        connection(server) as idle,
    ):
        for _ in range(requests):
            assert b" 404 " in await get(idle, "/ns/a")
        answer = await idle[0].read()
        assert answer == (b"404: Not Found" if requests else b"")


@pytest.mark.parametrize("limit", ["idle_timeout", "body_timeout"])
async def test_a_client_that_takes_no_bytes_loses_its_place(tmp_path: Path, limit: str) -> None:
    large_object(tmp_path)
    async with (
        store_in_this_process(tmp_path, max_connections=1, **{limit: 0.5}) as server,
        connection(server) as stalled,
        connection(server) as waiting,
    ):
        assert b" 200 OK" in await get(stalled, "/ns/large")
        assert b" 200 OK" in await get(waiting, "/healthz")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await stalled[0].readexactly(SIZE)


async def test_a_name_with_several_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them twice, one that this machine does not have; each of the others is served, also by
    a single place, which an address without clients does not keep."""
    found = socket.getaddrinfo

    def resolve(host: str, port: int, **hints: int) -> list[tuple[object, ...]]:
        addresses = "127.0.0.1", "203.0.113.1", "127.0.0.2", "127.0.0.1"
        return [a for name in addresses for a in found(name, port, type=hints["type"])]

    port = free_port("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    listener = StoreListener(StoreSettings(tmp_path, max_connections=1))
    assert await listener.start("store.example", port) == ("127.0.0.1", port)
    monkeypatch.undo()
    try:
        for _ in range(3):
            for host in ("127.0.0.2", "127.0.0.1"):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: store\r\n\r\n")
                assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
                writer.close()
                await writer.wait_closed()
    finally:
        await listener.close()


async def test_an_address_that_is_taken_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo

    def resolve(host: str, port: int, **hints: int) -> list[tuple[object, ...]]:
        return [a for n in ("127.0.0.2", "127.0.0.1") for a in found(n, port, type=hints["type"])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener = StoreListener(StoreSettings(tmp_path))
        with pytest.raises(OSError, match="in use"):
            await listener.start("store.example", port)
        await listener.close()
        socket.create_server(("127.0.0.2", port)).close()
