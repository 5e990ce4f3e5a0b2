"""`tandem store` over HTTP: what plain clients see, and its bounds."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from tandem_kvstore.server import capacity
from tandem_kvstore.server.app import StoreServer, StoreSettings

from .servers import tandem_store

pytestmark = pytest.mark.component

Client = TestClient[web.Request, web.Application]


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[Client]:
    settings = StoreSettings(tmp_path / "objects", max_object_bytes=600, capacity_bytes=1000)
    async with TestClient(TestServer(StoreServer(settings).app())) as client:
        yield client


async def put(http: Client, path: str, data: object, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.put(path, data=data, headers=named) as answer:
        return answer.status


async def test_objects_ranges_and_conditions(http: Client) -> None:
    assert await put(http, "/ns/a", b"0123456789") == 201
    assert await put(http, "/ns/a", b"9876543210") == 204
    async with http.get("/ns/a", headers={"Range": "bytes=2-4"}) as answer:
        assert (answer.status, await answer.read()) == (206, b"765")
        tag = answer.headers["ETag"]
    assert await put(http, "/ns/a", b"other", If_None_Match="*") == 412
    assert await put(http, "/ns/b", b"first", If_None_Match="*") == 201
    assert await put(http, "/ns/a", b"changed!", If_Match=tag) == 204
    assert await put(http, "/ns/a", b"again", If_Match=tag) == 412
    async with http.head("/ns/a") as answer:
        assert answer.content_length == len(b"changed!")
    for expected in (204, 204):
        async with http.delete("/ns/a") as answer:
            assert answer.status == expected
    async with http.get("/ns/a") as answer:
        assert answer.status == 404


@pytest.mark.parametrize(
    "path", ["/ns/%2e%2e/%2e%2e/x", "/%2e%2e/x", "/ns/.tmp-x", "/a//b", "/x", "/ns/a%2fb%00",
             "/" + "d/" * 17 + "x", "/ns/" + "n" * 300],
)  # fmt: skip
async def test_paths_outside_of_the_directory_are_refused(
    http: Client,
    path: str,
    tmp_path: Path,
) -> None:
    async with http.put(URL(path, encoded=True), data=b"x") as answer:
        assert answer.status in (400, 404)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


async def test_an_object_that_is_too_large_is_refused(http: Client) -> None:
    assert await put(http, "/ns/a", bytes(601)) == 413
    async with http.get("/ns/a") as answer:
        assert answer.status == 404


async def test_the_least_recently_used_chunks_leave(http: Client) -> None:
    first, second, third = (f"{i:064x}" for i in range(3))
    for key in (first, second):
        assert await put(http, f"/ns/{key}-00-aa", bytes(300)) == 201
        assert await put(http, f"/ns/{key}", bytes(100)) == 201
    async with http.get(f"/ns/{first}") as answer:
        assert answer.status == 200
    assert await put(http, f"/ns/{third}-00-aa", bytes(300)) == 201
    statuses = []
    for name in (first, f"{first}-00-aa", second, f"{second}-00-aa"):
        async with http.get(f"/ns/{name}") as answer:
            statuses.append(answer.status)
    assert statuses == [200, 200, 404, 404]


async def test_a_body_that_breaks_off_leaves_nothing(http: Client, tmp_path: Path) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionResetError

    with pytest.raises((aiohttp.ClientError, ConnectionResetError)):
        await http.put("/ns/a", data=half(), headers={"Content-Length": "100"})
    async with http.get("/ns/a") as answer:
        assert answer.status == 404
    async with http.get("/ns/?list") as answer:
        assert await answer.read() == b""


async def test_uploads_that_run_count_against_the_capacity(http: Client) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(300)
        begun.set()
        await goes_on.wait()
        yield bytes(300)

    upload = asyncio.create_task(put(http, "/ns/a", slow(), Content_Length="600"))
    await begun.wait()
    # The first piece may still be on its way.
    while (await put(http, "/ns/b", bytes(500))) != 507:
        await asyncio.sleep(0)
    assert await put(http, "/ns/c", bytes(400)) == 201
    goes_on.set()
    assert await upload == 201
    assert await put(http, "/ns/b", bytes(500)) == 201


async def test_a_client_that_sends_a_little_at_a_time_is_cut_off(tmp_path: Path) -> None:
    settings = StoreSettings(tmp_path / "objects", capacity_bytes=1000, body_timeout=0.2)

    async def trickle() -> AsyncIterator[bytes]:
        for _ in range(600):
            yield b"x"
            await asyncio.sleep(0.05)

    async with TestClient(TestServer(StoreServer(settings).app())) as http:
        # The connection may end before the client has read the answer.
        with suppress(aiohttp.ClientError):
            assert await put(http, "/ns/a", trickle(), Content_Length="600") == 408
        async with http.get("/ns/a") as answer:
            assert answer.status == 404
        # Its space is free again, and nothing of it is left.
        assert await put(http, "/ns/b", bytes(600)) == 201
    assert [file.name for file in (tmp_path / "objects/ns").iterdir()] == ["b"]


async def test_a_disk_that_takes_only_a_part_of_an_object_is_full(tmp_path: Path) -> None:
    # The limit of a file's size acts as a disk that fills: a write takes what fits.
    within = ("prlimit", "--fsize=50000")
    async with tandem_store(tmp_path, within=within) as server, aiohttp.ClientSession() as http:
        url = f"{server.location.endpoint}/ns/a"
        async with http.put(url, data=bytes(60_000)) as answer:
            assert answer.status == 507
        async with http.get(url) as answer:
            assert answer.status == 404
        async with http.put(url, data=bytes(50_000)) as answer:
            assert answer.status == 201


async def test_a_condition_on_an_object_that_is_gone_fails(http: Client) -> None:
    assert await put(http, "/ns/a", b"other") == 201
    assert await put(http, "/ns/gone", b"data", If_Match='"tag"') == 412


async def test_a_body_of_unknown_length_is_refused(http: Client) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"data"

    assert await put(http, "/ns/a", endless()) == 411


async def test_limits_hold_for_what_a_server_before_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the test alone, whose objects are years old.
    monkeypatch.setattr(capacity, "_SWEEP_SECONDS", 1e6)

    async def server(**limits: float) -> tuple[StoreServer, Client]:
        store = StoreServer(StoreSettings(tmp_path / "objects", **limits))  # type: ignore[arg-type]
        client = TestClient(TestServer(store.app()))
        await client.start_server()
        return store, client

    keys = [f"{i:064x}" for i in range(3)]
    _, first = await server()
    for key in keys:
        assert await put(first, f"/ns/{key}-00-aa", bytes(300)) == 201
        assert await put(first, f"/ns/{key}", bytes(100)) == 201
    await first.close()
    for age, key in enumerate(reversed(keys), 1):
        for file in (tmp_path / "objects/ns").glob(f"{key}*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    store, second = await server(capacity_bytes=1300, max_age=10.0)
    # The oldest chunk leaves as a whole for a new object.
    assert await put(second, "/ns/new", bytes(200)) == 201
    assert {file.name[:64] for file in (tmp_path / "objects/ns").iterdir()} == {*keys[1:], "new"}
    # Then those that were not used for the longest time.
    await store.capacity.remove_old(1e9 + 8.5)
    assert {file.name[:64] for file in (tmp_path / "objects/ns").iterdir()} == {keys[2], "new"}
    await second.close()
