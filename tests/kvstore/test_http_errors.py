"""Errors of a plain HTTP store."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_kvstore.errors import StoreUnsupported
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
