"""Errors of a plain HTTP store."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_kvstore.errors import StoreUnavailable, StoreUnsupported
from tandem_kvstore.location import store_location
from tandem_kvstore.stores import open_store


@pytest.mark.component
@pytest.mark.parametrize("headers", [{}, {"Last-Modified": "yesterday"}])
async def test_a_server_that_does_not_say_when_an_object_was_written(
    headers: dict[str, str],
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        store = open_store(store_location(str(server.make_url("")).rstrip("/"), "kv"))
        with pytest.raises(StoreUnsupported, match="Last-Modified"):
            await store.info("name")
        await store.close()


@pytest.mark.component
@pytest.mark.parametrize(
    "body", [b'{"name": "\xff"}\n', b'{"x":' + b"[" * 20_000, b" " * (2 << 20), b"{}\n"]
)
async def test_an_answer_that_is_no_listing(body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/x-ndjson")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        store = open_store(store_location(str(server.make_url("")).rstrip("/"), "kv"))
        with pytest.raises(StoreUnavailable, match="no listing"):
            [info async for info in store.scan()]
        await store.close()
