"""A prefill pod that passes a real engine's answers on, changed."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tandem_contract import transfer_params

from ..peers import Peer, Turn
from .engine import Engine

Params = dict[str, Any]
Change = Callable[[Params], Awaitable[Params | None]]
"""Another object in place of the engine's; None: none at all."""


def liar(engine: Engine, change: Change) -> Peer:
    """A server that asks `engine` and hands on what `change` makes of its params."""

    async def script(turn: Turn) -> None:
        url = engine.url + turn.request.target
        async with aiohttp.ClientSession() as http, http.post(url, data=turn.request.body) as got:
            answer = await got.json()
        changed = await change(answer.pop(transfer_params.FIELD))
        if changed is not None:
            answer[transfer_params.FIELD] = changed
        turn.answer(200, json.dumps(answer).encode())

    return Peer(script)
