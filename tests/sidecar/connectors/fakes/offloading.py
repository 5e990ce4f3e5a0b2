"""A fake of OffloadingConnector with its peer-to-peer tier.

prefill: stores the blocks of a request with `remote_decoder` under its id until they are fetched
decode: fetches the blocks that `remote_prefiller` names, and computes the ones that do not come
"""

import asyncio
import json
from collections import defaultdict
from typing import Any, Self

import aiohttp

from ...peers import Peer, Turn
from . import LOCAL, answer_prefill, answer_text, computed, params_of


class FakeOffloadingProducer:
    """Script of a prefill engine; the decode engine connects to `tier`."""

    def __init__(self) -> None:
        self.parked: dict[str, asyncio.Future[str]] = defaultdict(asyncio.Future)
        self.tier = Peer(self._fetch)

    async def __aenter__(self) -> Self:
        await self.tier.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.tier.__aexit__()

    async def __call__(self, turn: Turn) -> None:
        """A request to the engine itself; a block without an id is a store that fails."""
        parked = params_of(turn.request).get("remote_decoder")
        if parked is not None:
            self.parked[parked["kv_request_id"]].set_result(computed(turn.request))
        answer_prefill(turn)

    async def _fetch(self, turn: Turn) -> None:
        kv_request_id = turn.request.json["kv_request_id"]
        turn.answer(200, json.dumps(await self.parked[kv_request_id]).encode())


class FakeOffloadingConsumer:
    """Script of a decode engine."""

    def __init__(self, patience: asyncio.Event | None = None) -> None:
        self._given_up = patience or asyncio.Event()
        """Set: it waits no longer for blocks that do not come."""

    async def __call__(self, turn: Turn) -> None:
        peer = params_of(turn.request).get("remote_prefiller")
        if not peer or not all(
            peer.get(k) for k in ("kv_request_id", "remote_host", "remote_port")
        ):
            answer_text(turn, LOCAL, cached=0)
            return
        fetching = asyncio.create_task(fetch(peer))
        over = [asyncio.create_task(e.wait()) for e in (turn.gone, self._given_up)]
        await asyncio.wait({fetching, *over}, return_when=asyncio.FIRST_COMPLETED)
        for task in over:
            task.cancel()
        if fetching.done():
            answer_text(turn, f"decoded from {fetching.result()}")
            return
        fetching.cancel()
        if not turn.gone.is_set():
            answer_text(turn, LOCAL, cached=0)


async def fetch(peer: dict[str, Any]) -> str:
    url = f"http://{peer['remote_host']}:{peer['remote_port']}/fetch"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"kv_request_id": peer["kv_request_id"]}) as answer,
    ):
        kv: str = await answer.json()
        return kv
