"""Several replicas of the picker that share what they know, with a delay, in simulated time."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Final

from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.peers.channel import Knowledge
from tandem_epp.peers.frames import Event, decode_frame, encode_event
from tandem_epp.peers.inbox import Inbox
from tandem_epp.peers.outbox import Outbox
from tandem_epp.shared_fleet import SharedFleet

from .engine import Engine
from .policies import Choice
from .real_picker import PickerSettings, RealPicker
from .work import Work

DELAY: Final = 0.02
"""Seconds from an event to the other replicas; the channel takes less, see
benchmarks/exchange.py."""


class LoopbackMesh:
    """Stands for the channels of all replicas: each event arrives `delay` seconds later, through
    the same frames as over a network."""

    def __init__(self, replicas: Sequence[Knowledge], delay: float = DELAY) -> None:
        """`delay` is in seconds; infinite: a partition."""
        self.delay = delay
        self.now = 0.0
        self._replicas = replicas
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
            arrival = (self.now + self.delay, next(self._order), lambda f=frame: inbox.receive(f))
            heapq.heappush(self._flying, arrival)

    def _outbox(self, source: Knowledge, epochs: "count[int]") -> Outbox:
        return Outbox(epochs, lambda: map(encode_event, source.snapshot()))


class LoopbackChannel:
    """One replica's end of the mesh; a `shared_fleet.Publisher`."""

    has_peers = True

    def __init__(self, mesh: LoopbackMesh, source: int) -> None:
        self._mesh, self._source = mesh, source

    def publish(self, event: Event) -> None:
        """Send `event` to the others."""
        self._mesh.publish(self._source, event)


class ReplicatedPicker:
    """A router of several real pickers; each request meets one of them at random."""

    def __init__(
        self,
        engines: Sequence[Engine],
        seed: int,
        settings: PickerSettings | None = None,
        *,
        replicas: int = 3,
        delay: float = DELAY,
    ) -> None:
        self._random = Random(seed)
        self.pickers = [RealPicker(engines, seed + i, settings) for i in range(replicas)]
        shared = [SharedFleet(picker.fleet, lambda: self.mesh.now) for picker in self.pickers]
        self.mesh = LoopbackMesh(shared, delay)
        for i, (picker, knowledge) in enumerate(zip(self.pickers, shared, strict=True)):
            knowledge.publisher = self.mesh.channel(i)
            picker.picker.observer = knowledge
        self._placed: dict[int, RealPicker] = {}
        """Request → the replica that it met."""

    def choose(self, work: Work, now: float) -> Choice:
        """What one of the replicas decides."""
        self.mesh.advance(now)
        picker = self._placed[work.index] = self._random.choice(self.pickers)
        return picker.choose(work, now)

    def on_response(self, work: Work, status: int, now: float) -> None:
        """The response headers pass the replica that placed the request."""
        self.mesh.advance(now)
        self._placed[work.index].on_response(work, status, now)

    def on_end(self, work: Work, now: float) -> None:
        """The stream through the replica that placed the request ends."""
        self.mesh.advance(now)
        self._placed.pop(work.index).on_end(work, now)

    def on_scrape(self, pages: Sequence[ScrapeResult], now: float) -> None:
        """Each replica scrapes all pods."""
        self.mesh.advance(now)
        for picker in self.pickers:
            picker.on_scrape(pages, now)
