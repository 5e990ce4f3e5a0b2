"""A prefill pod that forwards a real engine's answers with changed transfer parameters."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tandem_contract import transfer_params

from ..peers import Peer, Turn
from .engine import Engine

Params = dict[str, Any]
Change = Callable[[Params], Awaitable[Params | None]]
"""Returns the object to send instead of the engine's; None: send none."""


def altering_proxy(engine: Engine, change: Change) -> Peer:
    """A server that forwards to `engine` and applies `change` to the parameters of its answers."""

    async def script(turn: Turn) -> None:
        url = engine.url + turn.request.target
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=turn.request.body) as response,
        ):
            answer = await response.json()
        changed = await change(answer.pop(transfer_params.FIELD))
        if changed is not None:
            answer[transfer_params.FIELD] = changed
        turn.answer(200, json.dumps(answer).encode())

    return Peer(script)
