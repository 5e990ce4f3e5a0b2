"""Several replicas of the picker that share what they know, with a delay, in simulated time."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Final

from tandem_contract.slo import Slo
from tandem_epp.replicas.peers.channel import Knowledge
from tandem_epp.replicas.peers.frames import Event, decode_frame, encode_event
from tandem_epp.replicas.peers.inbox import Inbox
from tandem_epp.replicas.peers.outbox import Outbox
from tandem_epp.replicas.shared_fleet import SharedFleet
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.routers import At, Page, Route, Router
from tandem_planner.simulation.work import Work

from .real_picker import PickerSettings, RealPicker

DELAY: Final = 0.0019
"""Median seconds from an event to another replica, as benchmarks/exchange.py measures."""
_DELAY_SPREAD: Final = 0.55
"""Standard deviation of the delay's logarithm: the 99th percentile is 3.6 times the median."""


class LoopbackMesh:
    """Stands for the channels of all replicas: each event arrives about `delay` seconds later, in
    order, through the same frames as over a network."""

    def __init__(
        self, replicas: Sequence[Knowledge], delay: float = DELAY, random: Random | None = None
    ) -> None:
        """`delay` is the median, in seconds; infinite: a partition."""
        self.delay = delay
        self.replicas = len(replicas)
        self.now = 0.0
        self.at: At = lambda time, action: None
        """Calls for `advance` when something arrives; without it, events wait for the next call."""
        self._random = random or Random(0)
        self._latest: dict[tuple[int, int], float] = {}
        """Source and target → when its last frame arrives."""
        self._order = count()
        self._flying: list[tuple[float, int, Callable[[], object]]] = []
        epochs = count()
        self._outboxes = [[self._outbox(source, epochs) for _ in replicas] for source in replicas]
        self._inboxes = [
            [Inbox(str(source), target, lambda verdict, events: None) for target in replicas]
            for source in range(len(replicas))
        ]

    def channel(self, source: int) -> "LoopbackChannel":
        """The publisher of one replica."""
        return LoopbackChannel(self, source)

    def publish(self, source: int, event: Event) -> None:
        """Send `event` of `source` to all others."""
        encoded = encode_event(event)
        for target, outbox in enumerate(self._outboxes[source]):
            if target != source:
                outbox.put(encoded)
                self._send(source, target)

    def advance(self, now: float) -> None:
        """Deliver what arrives until `now`."""
        self.now = now
        while self._flying and self._flying[0][0] <= now:
            heapq.heappop(self._flying)[2]()

    def _send(self, source: int, target: int) -> None:
        outbox, inbox = self._outboxes[source][target], self._inboxes[source][target]
        if self.delay == float("inf"):
            return
        while not outbox.is_empty:
            frame = decode_frame(outbox.next_frame().data)
            delay = self.delay * self._random.lognormvariate(0.0, _DELAY_SPREAD)
            arrival = max(self.now + delay, self._latest.get((source, target), 0.0))
            self._latest[source, target] = arrival
            entry = (arrival, next(self._order), lambda f=frame: inbox.receive(f))
            heapq.heappush(self._flying, entry)
            self.at(arrival, partial(self.advance, arrival))

    def _outbox(self, source: Knowledge, epochs: "count[int]") -> Outbox:
        return Outbox(epochs, lambda: map(encode_event, source.snapshot()))


class LoopbackChannel:
    """One replica's end of the mesh; a `replicas.shared_fleet.Publisher`."""

    has_peers = True

    def __init__(self, mesh: LoopbackMesh, source: int) -> None:
        self._mesh, self._source = mesh, source

    @property
    def rank(self) -> tuple[int, int]:
        """As the channel's."""
        return self._source, self._mesh.replicas

    @property
    def replicas(self) -> int:
        """All of the mesh."""
        return self._mesh.replicas

    def publish(self, event: Event) -> None:
        """Send `event` to the others."""
        self._mesh.publish(self._source, event)


class ReplicatedPicker(Router):
    """A router of several real pickers."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        settings: PickerSettings | None = None,
        *,
        replicas: int = 3,
        delay: float = DELAY,
    ) -> None:
        self.replicas = replicas
        self.pickers = [RealPicker(engines, seed + i, settings) for i in range(replicas)]
        shared = [SharedFleet(picker.fleet, lambda: self.mesh.now) for picker in self.pickers]
        self.mesh = LoopbackMesh(shared, delay, Random(seed))
        for i, (picker, knowledge) in enumerate(zip(self.pickers, shared, strict=True)):
            knowledge.publisher = self.mesh.channel(i)
            picker.picker.observer = knowledge
        self._placed: dict[int, RealPicker] = {}
        """Request → the replica that it met."""

    def start(self, at: At) -> None:
        """Events between replicas arrive by themselves."""
        self.mesh.at = at

    def choose(self, work: Work, now: float, replica: int = 0) -> Route:
        """What `replica` decides."""
        self.mesh.advance(now)
        picker = self._placed[work.index] = self.pickers[replica]
        return picker.choose(work, now)

    def meet(self, slo: Slo) -> None:
        """As that of one picker."""
        for picker in self.pickers:
            picker.meet(slo)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers pass the replica that placed the request."""
        self.mesh.advance(now)
        self._placed[work.index].on_response(work, status, now)

    def on_end(self, work: Work, now: float) -> None:
        """The stream through the replica that placed the request ends."""
        self.mesh.advance(now)
        self._placed.pop(work.index).on_end(work, now)

    def on_scrape(self, pages: Sequence[Page], now: float) -> None:
        """Each replica scrapes all pods."""
        self.mesh.advance(now)
        for picker in self.pickers:
            picker.on_scrape(pages, now)
