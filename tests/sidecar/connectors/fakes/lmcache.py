"""A fake of LMCache's store, and of engines with LMCacheConnectorV1 or LMCacheMPConnector.

P: stores the KV of the prompt under the model and the prompt. The store may list it only some time
   after the answer, because both connectors store in the background.
D: looks the prompt up, whatever the request says, and computes what the store does not have
"""

import asyncio

from ...peers import Received, Turn
from . import LOCAL, answer_prefill, answer_text, computed


class FakeLmcacheStore:
    """What both engines use. KV is listed only once it is complete."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.has_stored = asyncio.Event()

    def put(self, request: Received) -> None:
        self.stored[_key(request)] = computed(request)
        self.has_stored.set()

    def get(self, request: Received) -> str | None:
        return self.stored.get(_key(request))


class FakeLmcacheProducer:
    """Script of a prefill engine."""

    def __init__(self, store: FakeLmcacheStore, *, stores: asyncio.Event | None = None) -> None:
        """`stores`: if it is given, the engine stores only when it is set, after its answer."""
        self._store = store
        self._stores = stores

    async def __call__(self, turn: Turn) -> None:
        if self._stores is None:
            self._store.put(turn.request)
        answer_prefill(turn)
        if self._stores is not None:
            await self._stores.wait()
            self._store.put(turn.request)


class FakeLmcacheConsumer:
    """Script of a decode engine."""

    def __init__(self, store: FakeLmcacheStore) -> None:
        self._store = store

    async def __call__(self, turn: Turn) -> None:
        kv = self._store.get(turn.request)
        answer_text(turn, LOCAL if kv is None else f"decoded from {kv}", 0 if kv is None else 1500)


def _key(request: Received) -> str:
    # Neither the adapter, nor the client's cache salt, nor any id of the request is part of it.
    return str(request.json.get("prompt"))
