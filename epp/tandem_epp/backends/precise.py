"""Joins tokenized prompts and KV events: what each pod has cached of a request's prompt, exactly.

    precise.apply(events, tokenizers, stored)  as the configuration says
    match = await precise.prepare(kind, body)  before the pick; None: it goes ahead approximately

Where a pod's events are not followed, where the prompt cannot be tokenized in time, and without a
configuration, the approximate index answers (`llmd.plugins.profile`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_contract.commandline import HostPort
from tandem_contract.prompt_length import ANY_VOCABULARY, TokenSizes
from tandem_contract.request_kinds import RequestKind

from ..prefix.kv_events.collector import EventCollector, PodEngine, PreciseMatch
from ..prefix.kv_events.settings import EventSettings
from ..prefix.kv_events.subscriber import EngineAddress
from ..prefix.pod_blocks import PodBlocks
from ..prefix.tokenization.models import ModelTokenizers
from ..prefix.tokenization.tokenizer import TokenizerSettings
from .fleet import Fleet
from .pods import Pod

_RESULTS: Final = ("found", "missing", "unknown")
SYNC_SECONDS: Final = 1.0
"""Seconds between looks for pods that came or left, or whose address was resolved."""


class PrecisePrefixes:
    """The precise prefix index of a fleet, on one event loop."""

    def __init__(self, fleet: Fleet, observe_tokenization: Callable[[str, float], None]) -> None:
        """`observe_tokenization`: see `PromptTokenizer`."""
        self._fleet, self._observe = fleet, observe_tokenization
        self._settings: tuple[EventSettings | None, Sequence[TokenizerSettings], int]
        self._settings = (None, (), 0)
        self.collector: EventCollector | None = None
        """None while the index is off."""
        self.lookups: Counter[str] = Counter()
        """Prompts that were looked up in the index of external stores, by result."""
        self._tokenizers: ModelTokenizers | None = None
        self._sync: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_on(self) -> bool:
        """Whether events are followed."""
        return self.collector is not None

    def apply(
        self,
        events: EventSettings | None,
        tokenizers: Sequence[TokenizerSettings],
        stored_bytes: int = 0,
    ) -> None:
        """Replace the configuration, `events` being None where the index is off; to be called on
        the event loop. `stored_bytes`: bytes for what external stores have; 0: it is ignored."""
        if (events, tokenizers, stored_bytes) == self._settings:
            return
        self._stop()
        self._settings = events, tokenizers, stored_bytes
        if events is None:
            return
        self._tokenizers = ModelTokenizers(tokenizers, self._observe)
        stored = PodBlocks(stored_bytes) if stored_bytes else None
        self.collector = EventCollector(PodBlocks(events.max_bytes), stored)
        self._sync = asyncio.create_task(self._follow(self.collector, events))

    async def prepare(self, kind: RequestKind, body: bytes) -> PreciseMatch | None:
        """What each pod has cached of the prompt in `body`; None when that is not known."""
        if self._tokenizers is None:
            return None
        prompt = await self._tokenizers.tokenize(kind, body)
        match = None
        # The configuration may have changed meanwhile.
        if prompt is not None and self.collector is not None:
            # Token ids that no vocabulary has: the engine refuses the request.
            with suppress(OverflowError):
                match = await self.collector.match(prompt)
        if self.collector is not None and self.collector.stored is not None:
            self.lookups[_result(match)] += 1
        return match

    def sizes(self, model: str | None) -> TokenSizes:
        """What no token of a prompt for `model` exceeds."""
        return ANY_VOCABULARY if self._tokenizers is None else self._tokenizers.sizes(model)

    async def close(self) -> None:
        """End the subscribers and the tokenizers."""
        self._stop()
        for task in list(self._closing):
            await task

    def _stop(self) -> None:
        if self._sync is not None:
            self._sync.cancel()
        for part in (self._tokenizers, self.collector):
            if part is not None:
                task = asyncio.create_task(part.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        self._sync = self._tokenizers = self.collector = None

    async def _follow(self, collector: EventCollector, settings: EventSettings) -> None:
        while True:
            collector.sync(list(_engines(self._fleet, settings)))
            await asyncio.sleep(SYNC_SECONDS)


class PreciseCollector(Collector):
    """Metrics of the precise index, computed when Prometheus scrapes them."""

    def __init__(self, precise: PrecisePrefixes) -> None:
        self._precise = precise

    def collect(self) -> Iterable[Metric]:
        collector = self._precise.collector
        events = CounterMetricFamily(
            "tandem_epp_kv_events_total",
            "KV events by type: stored, removed, cleared; ignored (other media, other groups of "
            "layers, unknown types); malformed. Unplaced counts blocks whose parent is unknown or "
            "for which there is no memory. storage_stored, storage_removed and storage_unplaced "
            "are of external storage.",
            labels=("type",),
        )
        replays = CounterMetricFamily(
            "tandem_epp_kv_event_replays_total",
            "Gaps in the batches of KV events (gap), and replays by result: continued, restarted "
            "(everything since the engine's start), incomplete (batches are lost), failed (no "
            "answer).",
            labels=("result",),
        )
        knowledge = GaugeMetricFamily(
            "tandem_epp_kv_events_knowledge",
            "How much of a backend's cache is known by its KV events: 0 nothing (no connection), 1 "
            "a part (events were missed), 2 all.",
            labels=("backend",),
        )
        blocks = GaugeMetricFamily(
            "tandem_epp_kv_blocks", "KV blocks of a backend in the index.", labels=("backend",)
        )
        pod_bytes = GaugeMetricFamily(
            "tandem_epp_kv_index_pod_bytes",
            "Bytes of the index that one backend takes alone.",
            labels=("backend",),
        )
        total = GaugeMetricFamily(
            "tandem_epp_kv_index_bytes", "Bytes of the index, over all backends."
        )
        stored = GaugeMetricFamily(
            "tandem_epp_kv_storage_index_bytes",
            "Bytes of the index of what external stores have; absent without storage_offloading.",
        )
        stored_blocks = GaugeMetricFamily(
            "tandem_epp_kv_storage_blocks",
            "KV blocks that external stores have, in the index: a block of a store counts once, "
            "whichever engines wrote it. Absent without storage_offloading.",
        )
        lookups = CounterMetricFamily(
            "tandem_epp_kv_storage_lookups_total",
            "Prompts by what external stores have of them: found, missing, or unknown, because the "
            "prompt could not be tokenized. Absent without storage_offloading.",
            labels=("result",),
        )
        if collector is not None:
            if collector.stored is not None:
                stored.add_metric((), collector.stored.bytes)
                stored_blocks.add_metric(
                    (), sum(map(collector.stored.count, collector.stored.pods))
                )
                for result in _RESULTS:
                    lookups.add_metric((result,), self._precise.lookups[result])
            for kind, count in collector.events.items():
                events.add_metric((kind,), count)
            for result, count in collector.replays.items():
                replays.add_metric((result,), count)
            for pod in collector.pods:
                knowledge.add_metric((pod,), collector.knowledge(pod))
                blocks.add_metric((pod,), collector.blocks.count(pod))
                pod_bytes.add_metric((pod,), collector.blocks.pod_bytes(pod))
            total.add_metric((), collector.blocks.bytes)
        return (
            events, replays, knowledge, blocks, pod_bytes, total, stored, stored_blocks, lookups,
        )  # fmt: skip


def _result(match: PreciseMatch | None) -> str:
    """Of a look-up in the index of external stores."""
    if match is None:
        return "unknown"
    return "found" if any(match.stored.values()) else "missing"


def _engines(fleet: Fleet, settings: EventSettings) -> Iterator[PodEngine]:
    """The engines of all pods whose address is known."""
    for pod in fleet:
        if pod.address is not None:
            address = _address(pod, pod.address, settings)
            yield PodEngine(pod.name, pod.number, address, pod.store)


def _address(pod: Pod, serving: str, settings: EventSettings) -> EngineAddress:
    host = serving.rpartition(":")[0].strip("[]")
    rank = pod.rank or 0
    return EngineAddress(
        f"tcp://{HostPort(host, settings.port + rank)}",
        f"tcp://{HostPort(host, settings.replay_port + rank)}",
        settings.topic,
    )
