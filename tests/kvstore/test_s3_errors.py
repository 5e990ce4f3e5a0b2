"""Errors of an S3 store: told by its answer, not by digits that are in their text by chance."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_kvstore.errors import ObjectMissing, StoreError, StoreFull, StoreUnavailable
from tandem_kvstore.stores import open_store
from tandem_kvstore.stores.s3 import error_by_text

from .servers import s3_location


@pytest.mark.parametrize(
    "text",
    [
        "Error performing PUT https://127.0.0.1:26507/b/x in 4.1ms - HTTP error: no route",
        "Error performing PUT https://127.0.0.1:9000/b/x in 507.416µs - HTTP error: no route",
        "Error performing GET https://127.0.0.1:9000/b/ab416cd507 in 1s - HTTP error: no route",
    ],
)
def test_a_port_a_duration_and_a_key_are_no_status(text: str) -> None:
    assert type(error_by_text("PUT x", text)) is StoreUnavailable


@pytest.mark.component
@pytest.mark.parametrize(
    ("status", "error"),
    [(507, StoreFull), (404, ObjectMissing), (500, StoreUnavailable)],
)
async def test_each_status_is_its_error(status: int, error: type[StoreError]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        store = open_store(s3_location(str(server.make_url("")).rstrip("/")))
        with pytest.raises(StoreError) as raised:
            await store.get("x", 8, is_cut=True)
        await store.close()
    assert type(raised.value) is error


@pytest.mark.component
async def test_an_object_of_which_no_range_can_be_sent_has_no_bytes() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=416)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        store = open_store(s3_location(str(server.make_url("")).rstrip("/")))
        assert await store.get("x", 8) == b""
        await store.close()
