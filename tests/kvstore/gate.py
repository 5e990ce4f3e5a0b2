"""A proxy before a real store that answers some requests itself, as a policy of the store would."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web

from tandem_kvstore.location import StoreLocation

Refuse = Callable[[web.Request], web.Response | None]
"""The answer to a request; None: the store answers."""


@dataclass
class Gate:
    """A running proxy. `refuse` may be replaced at any time."""

    location: StoreLocation
    refuse: Refuse


def refuse_nothing(_: web.Request) -> web.Response | None:
    """Every request reaches the store."""
    return None


def refuse_conditions(request: web.Request) -> web.Response | None:
    """501 to a conditional write."""
    is_conditional = {"If-None-Match", "If-Match"} & request.headers.keys()
    return error(501, "NotImplemented") if request.method == "PUT" and is_conditional else None


def deny_conditions(request: web.Request) -> web.Response | None:
    """403 to a conditional write, as by a policy."""
    return None if refuse_conditions(request) is None else error(403, "AccessDenied")


def error(status: int, code: str) -> web.Response:
    """An error as S3 words it."""
    body = f"<Error><Code>{code}</Code><Message>{code}.</Message></Error>"
    return web.Response(status=status, text=body, content_type="application/xml")


@asynccontextmanager
async def gate(location: StoreLocation, refuse: Refuse = refuse_nothing) -> AsyncIterator[Gate]:
    """Run a proxy before the store at `location`."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as http:

        async def serve(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            if (answer := running.refuse(request)) is not None:
                return answer
            # The header Host stays as it was: an S3 signature covers it.
            url = location.endpoint + request.raw_path
            async with http.request(
                request.method, url, data=body, headers=request.headers, allow_redirects=False
            ) as reply:
                headers = reply.headers.copy()
                headers.popall("Transfer-Encoding", None)
                content = await reply.read()
                return web.Response(status=reply.status, headers=headers, body=content)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", serve)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            running = Gate(replace(location, endpoint=endpoint), refuse)
            yield running
        finally:
            await runner.cleanup()
