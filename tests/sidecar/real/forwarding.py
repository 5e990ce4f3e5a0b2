"""A prefill pod that keeps the answers of a real engine back, or answers in its stead."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from ..peers import Peer, Turn
from .engine import Engine

Interruption = Callable[[Turn], Awaitable[bool]]
"""Called once the engine has answered; False: it answered in the engine's stead."""


def forwarding_pod(engine: Engine, interrupt: Interruption) -> Peer:
    """A server that forwards to `engine`, and asks `interrupt` before it sends the answer.

    As with an engine, the request is aborted when the client goes away.
    """

    async def script(turn: Turn) -> None:
        forward = asyncio.create_task(_forward(turn, engine))
        gone = asyncio.create_task(turn.gone.wait())
        await asyncio.wait([forward, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not forward.done():
            forward.cancel()
            await asyncio.wait([forward])
            return
        status, answer = forward.result()
        if await interrupt(turn):
            turn.answer(status, answer)

    return Peer(script)


async def _forward(turn: Turn, engine: Engine) -> tuple[int, bytes]:
    request = turn.request
    names = ("x-request-id", "content-type")
    headers = {name: request.headers[name] for name in names if name in request.headers}
    url = engine.url + request.target
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, data=request.body, headers=headers) as response,
    ):
        return response.status, await response.read()
