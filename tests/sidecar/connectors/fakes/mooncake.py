"""A fake of MooncakeConnector: bootstrap server, producer and consumer.

prefill: holds the KV of a request that ended by length under its transfer_id
decode: queries the bootstrap server for the engine, and asks the engine for the transfer_id until
the KV is there
"""

import asyncio
import json
from collections import defaultdict
from typing import Any, Self

import aiohttp

from ...peers import Peer, Turn
from . import LOCAL, answer_prefill, answer_text, computed, params_of, refuse

PULLED = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class FakeMooncakeProducer:
    """Script of a prefill engine; the decode engine connects to `registry` and `worker`."""

    def __init__(self) -> None:
        self.engine_id = "engine-p"
        self.finish = "length"
        self.hold_until_pulled = False
        self.kept: dict[str, asyncio.Future[str]] = defaultdict(asyncio.Future)
        self.pulled = asyncio.Event()
        self.worker = Peer(self._pull)
        self.registry = Peer(self._query)

    async def __aenter__(self) -> Self:
        await self.worker.__aenter__()
        await self.registry.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.registry.__aexit__()
        await self.worker.__aexit__()

    async def __call__(self, turn: Turn) -> None:
        """A request to the engine itself."""
        params = params_of(turn.request)
        if params.get("do_remote_prefill"):
            refuse(turn)
            return
        if self.hold_until_pulled:
            await self.pulled.wait()
        if params.get("do_remote_decode") and params.get("transfer_id") and self.finish == "length":
            self.kept[params["transfer_id"]].set_result(computed(turn.request))
        answer_prefill(turn, finish=self.finish)

    async def _query(self, turn: Turn) -> None:
        assert (turn.request.method, turn.request.target) == ("GET", "/query")
        addresses = {"0": {"0": str(self.worker.address)}}
        ranks = {"0": {"engine_id": self.engine_id, "worker_addr": addresses}}
        turn.answer(200, json.dumps(ranks).encode())

    async def _pull(self, turn: Turn) -> None:
        """Waits for a transfer_id of which nothing is known yet: D may well be first."""
        self.pulled.set()
        transfer_id = turn.request.json["transfer_id"]
        kv = await self.kept[transfer_id]
        del self.kept[transfer_id]
        turn.answer(200, json.dumps(kv).encode())


class FakeMooncakeConsumer:
    """Script of a decode engine."""

    async def __call__(self, turn: Turn) -> None:
        params = params_of(turn.request)
        if params.get("do_remote_decode"):
            refuse(turn)
        elif not params.get("do_remote_prefill") or not all(name in params for name in PULLED):
            answer_text(turn, LOCAL, cached=0)
        else:
            await self._load(turn, params)

    async def rejected(self, params: dict[str, Any]) -> None:
        """What it does for a request it refused: has the producer free the blocks."""
        assert params["do_remote_prefill"]
        assert await pull(params) is not None

    async def _load(self, turn: Turn, params: dict[str, Any]) -> None:
        pulling = asyncio.create_task(pull(params))
        disconnect = asyncio.create_task(turn.gone.wait())
        await asyncio.wait({pulling, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not pulling.done():
            pulling.cancel()
        elif (kv := pulling.result()) is None:
            turn.answer(500, b'{"error": {"message": "remote engine_id not found"}}')
        else:
            answer_text(turn, f"decoded from {kv}")


async def pull(params: dict[str, Any]) -> str | None:
    """The KV; None when the registry knows no such engine."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{params['remote_bootstrap_addr']}/query") as answer:
            ranks = (await answer.json()).values()
        ranks_of_engine = [
            rank for rank in ranks if rank["engine_id"] == params["remote_engine_id"]
        ]
        if not ranks_of_engine:
            return None
        worker = ranks_of_engine[0]["worker_addr"]["0"]["0"]
        wanted = {"transfer_id": params["transfer_id"]}
        async with http.post(f"http://{worker}/pull", json=wanted) as answer:
            kv: str = await answer.json()
            return kv
