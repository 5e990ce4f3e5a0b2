"""Follows the KV events of every pod, and answers how much of a prompt each pod has cached.

collector.sync(engines)              one subscriber per engine, started and cancelled
await collector.match(prompt) ─► PreciseMatch
"""

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import zmq.asyncio

from ...supervised import SupervisedTask
from ..block_keys import TokenizedPrompt
from ..blocks import BlockMatch, CachedPrefix
from ..pod_blocks import PodBlocks
from .feed import Knowledge, PodFeed, StoreIndex
from .subscriber import EngineAddress, Subscriber

_SWEEP_BLOCKS: Final = 500
"""Blocks swept before other tasks may run: one to two milliseconds."""
_WALK_BLOCKS: Final = 256
"""Blocks of a prompt looked up before other tasks may run: about 0.15 ms. More: the walk of a long
prompt delays other requests. Fewer: its own request waits for more of them."""
_STORE_SECONDS: Final = 600.0
"""Seconds without a pod after which what a store has is forgotten: pods that are replaced find it
again, and a store that another one replaced takes no memory."""
_SWEEP_SECONDS: Final = 0.5
"""Seconds between looks for blocks to sweep."""


@dataclass(frozen=True, slots=True)
class PodEngine:
    """An engine to follow."""

    pod: str
    """The backend's name."""
    identity: Hashable
    """Another identity under the same name is another pod."""
    address: EngineAddress
    store: str | None = None
    """Its external store: `Pod.store`."""


@dataclass(frozen=True, slots=True)
class PreciseMatch:
    """How much of one prompt the pods have cached, by their events."""

    prompt_tokens: int
    """Length of the prompt, exactly."""
    blocks: BlockMatch
    knowledge: Mapping[str, Knowledge]
    """Pods of which nothing is known may be absent."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """Pod → tokens of the prompt's start that its external store has, if any."""

    def aged(self) -> "PreciseMatch":
        """The match some time later: pods have what it says, and perhaps more."""
        known = {pod: min(each, Knowledge.PARTIAL) for pod, each in self.knowledge.items()}
        return replace(self, knowledge=known)

    def cached(self, pod: str) -> CachedPrefix | None:
        """The cached prefix on `pod`; None if nothing is known of the pod."""
        known = self.knowledge.get(pod, Knowledge.NOTHING)
        return None if known is Knowledge.NOTHING else self.blocks.prefix(pod)

    def is_whole(self, pod: str) -> bool:
        """Whether `pod` has nothing cached beyond what `cached` says."""
        return self.knowledge.get(pod) is Knowledge.WHOLE


@dataclass(slots=True)
class _Followed:
    """One engine's subscriber."""

    engine: PodEngine
    feed: PodFeed
    task: SupervisedTask


class EventCollector:
    """The subscribers of all pods, on one event loop."""

    def __init__(self, blocks: PodBlocks, stored: PodBlocks | None = None) -> None:
        """`stored`: the blocks of external stores, by store; None: they are not followed."""
        self.blocks, self.stored = blocks, stored
        self._store_used: dict[str, float] = {}
        """Store → when a pod last had it, by the event loop's clock."""
        self.events: Counter[str] = Counter()
        """Events by type; see `PodFeed`."""
        self.replays: Counter[str] = Counter()
        """Gaps, and replays by result; see `Subscriber`."""
        self._followed: dict[str, _Followed] = {}
        self._ended: set[asyncio.Task[None]] = set()
        """Those that wait for cancelled tasks to close their sockets."""
        self._context: zmq.asyncio.Context | None = None
        self._sweeper: SupervisedTask | None = None

    def sync(self, engines: Iterable[PodEngine]) -> None:
        """Follow exactly these engines; to be called on the event loop."""
        by_pod = {engine.pod: engine for engine in engines}
        for pod, followed in list(self._followed.items()):
            if by_pod.get(pod) != followed.engine:
                self._end(pod)
        for pod, engine in by_pod.items():
            if pod not in self._followed:
                self._start(engine)
        self._drop_unused_stores(asyncio.get_running_loop().time())

    def knowledge(self, pod: str) -> Knowledge:
        """How much is known of `pod`."""
        followed = self._followed.get(pod)
        return followed.feed.knowledge if followed is not None else Knowledge.NOTHING

    @property
    def pods(self) -> Iterable[str]:
        """The pods whose engines are followed."""
        return self._followed.keys()

    async def match(self, prompt: TokenizedPrompt) -> PreciseMatch:
        """How much of `prompt` each pod has cached now; other tasks may run every _WALK_BLOCKS
        blocks. Raises OverflowError for token ids that do not fit in 32 bits."""
        keys = {size: prompt.keys(size) for size in self.blocks.block_sizes}
        walks = self.blocks.walks(keys)
        for walk in walks:
            while walk.advance(_WALK_BLOCKS):  # noqa: ASYNC110 (it waits for nothing)
                await asyncio.sleep(0)
        blocks = self.blocks.result(walks)
        knowledge = {pod: followed.feed.knowledge for pod, followed in self._followed.items()}
        stored = await self._match_stores(prompt)
        return PreciseMatch(len(prompt.token_ids), blocks, knowledge, stored)

    async def _match_stores(self, prompt: TokenizedPrompt) -> Mapping[str, int]:
        """What the store of each pod has of `prompt`."""
        if self.stored is None or not (sizes := self.stored.block_sizes):
            return {}
        walks = self.stored.walks({size: prompt.keys(size) for size in sizes})
        for walk in walks:
            while walk.advance(_WALK_BLOCKS):  # noqa: ASYNC110 (it waits for nothing)
                await asyncio.sleep(0)
        prefixes = self.stored.result(walks).prefixes
        return {
            pod: prefixes[store].total
            for pod, followed in self._followed.items()
            if (store := followed.engine.store) is not None and store in prefixes
        }

    def _drop_unused_stores(self, now: float) -> None:
        if self.stored is None:
            return
        for followed in self._followed.values():
            if followed.engine.store is not None:
                self._store_used[followed.engine.store] = now
        for store, used in list(self._store_used.items()):
            if now - used > _STORE_SECONDS:
                del self._store_used[store]
                self.stored.drop(store)

    async def close(self) -> None:
        """End every subscriber and close the sockets."""
        self.sync(())
        await asyncio.gather(*self._ended)
        if self._sweeper is not None:
            self._sweeper.cancel()
            await self._sweeper.wait()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _start(self, engine: PodEngine) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._sweeper = SupervisedTask("the sweep of the precise index", self._sweep)
        store = None
        if self.stored is not None and engine.store is not None:
            store = StoreIndex(engine.store, self.stored)
        feed = PodFeed(engine.pod, self.blocks, self.events, store)
        subscriber = Subscriber(self._context, engine.address, feed, self._count_replay)
        name = f"following the KV events of {engine.pod}"
        # After an error nothing is known of the pod until a connection and a replay.
        task = SupervisedTask(name, subscriber.run, feed.disconnect)
        self._followed[engine.pod] = _Followed(engine, feed, task)

    def _end(self, pod: str) -> None:
        task = self._followed.pop(pod).task
        task.cancel()
        ending = asyncio.create_task(task.wait())
        self._ended.add(ending)
        ending.add_done_callback(self._ended.discard)
        self.blocks.drop(pod)

    def _count_replay(self, result: str) -> None:
        self.replays[result] += 1

    async def _sweep(self) -> None:
        while True:
            has_more = self.blocks.sweep(_SWEEP_BLOCKS)
            if self.stored is not None:
                has_more |= self.stored.sweep(_SWEEP_BLOCKS)
            await asyncio.sleep(0 if has_more else _SWEEP_SECONDS)
