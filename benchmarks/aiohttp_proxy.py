"""aiohttp as a bare proxy: each request is sent on to an engine, and its answer is passed back.

    python -m benchmarks.aiohttp_proxy PORT ENGINE_PORT

The least that aiohttp's server and client need for this: no plan, no log, no metrics. The event
loop is uvloop, as in the sidecar.
"""

from collections.abc import AsyncIterator
from typing import Final

import aiohttp
import click
import uvloop
from aiohttp import hdrs, web

_SESSION: Final = web.AppKey("session", aiohttp.ClientSession)
_OF_THE_CONNECTION: Final = frozenset({"host", "connection", "content-length", "transfer-encoding"})
_SKIPPED: Final = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT)
"""Headers that aiohttp's client would add to a request."""


def application(engine: str) -> web.Application:
    """The proxy before `engine`, a URL without a path."""

    async def with_session(app: web.Application) -> AsyncIterator[None]:
        # Answers are passed on as they are.
        async with aiohttp.ClientSession(
            engine, auto_decompress=False, skip_auto_headers=_SKIPPED
        ) as session:
            app[_SESSION] = session
            yield

    app = web.Application(client_max_size=32 << 20)
    app.cleanup_ctx.append(with_session)
    app.router.add_route("*", "/{path:.*}", _forward)
    return app


async def _forward(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    sent = {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in _OF_THE_CONNECTION
    }
    async with request.app[_SESSION].request(
        request.method, request.rel_url, headers=sent, data=body
    ) as answer:
        if answer.content_length is not None:
            return web.Response(
                status=answer.status,
                body=await answer.read(),
                content_type=answer.content_type,
            )
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


@click.command()
@click.argument("port", type=int)
@click.argument("engine_port", type=int)
def main(port: int, engine_port: int) -> None:
    """Serve on 127.0.0.1 until a signal comes."""
    app = application(f"http://127.0.0.1:{engine_port}")
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
