"""What the replicas of an EPP know together: tells what this one places, applies what others tell.

`SharedFleet` observes this replica's placements and publishes them; it applies those of others to
the `Fleet` through `RemoteRequest`, so that the scheduler sees one fleet. It does no I/O: the
publisher is the `peers.channel`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from time import time
from typing import Final, Protocol

from .backends.fleet import Fleet
from .peers.frames import (
    Event,
    RequestAnswered,
    RequestEnded,
    RequestStarted,
    pack,
)
from .placement import Placement
from .remote_request import RemoteRequest

SNAPSHOT_BYTES: Final = 4 << 20
"""Bytes of prefix chains in a snapshot; beyond them requests come without their chains. Less than
what the queue of a peer holds (`peers.outbox.MAX_QUEUE`), which would overflow otherwise."""


class Publisher(Protocol):
    """Sends events to the other replicas."""

    @property
    def has_peers(self) -> bool:
        """Whether a replica is connected."""

    def publish(self, event: Event) -> None:
        """Send `event` to all connected replicas; never waits."""


class SharedFleet:
    """The part of the fleet's state that replicas share."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float] = time) -> None:
        """`clock` returns Unix seconds."""
        self.publisher: Publisher | None = None
        """None: events go nowhere."""
        self._fleet, self._clock = fleet, clock
        self._numbers = count(1)
        self._own: dict[int, Placement] = {}
        """Number → placement of this replica that has not ended."""
        self._remote: defaultdict[str, dict[int, RemoteRequest]] = defaultdict(dict)
        """Peer → number → its request that has not ended."""

    # What this replica does: `placement.PlacementObserver`.

    def on_started(self, placement: Placement) -> None:
        placement.number = next(self._numbers)
        self._own[placement.number] = placement
        if (publisher := self._publisher()) is not None:
            publisher.publish(_started(placement, placement.decision.decided_at, SNAPSHOT_BYTES))

    def on_answered(self, placement: Placement, status: int) -> None:
        if (publisher := self._publisher()) is not None:
            publisher.publish(RequestAnswered(placement.number, status, placement.decode.name))

    def on_ended(self, placement: Placement) -> None:
        del self._own[placement.number]
        if (publisher := self._publisher()) is not None:
            publisher.publish(RequestEnded(placement.number))

    def _publisher(self) -> Publisher | None:
        # Without peers no event is made: the chains of long prompts take time.
        return self.publisher if self.publisher is not None and self.publisher.has_peers else None

    # What others do: `peers.channel.Knowledge`.

    def snapshot(self) -> Iterator[Event]:
        """The requests of this replica that have not ended, the newest first."""
        now, left = self._clock(), SNAPSHOT_BYTES
        for placement in reversed(self._own.values()):
            event = _started(placement, now, left)
            left -= len(event.chain)
            yield event

    def reset(self, peer: str) -> None:
        for request in self._remote.pop(peer, {}).values():
            request.end()

    def apply(self, peer: str, event: Event) -> None:
        requests = self._remote[peer]
        match event:
            case RequestStarted():
                # A peer does not use a number twice; if it does, no count is lost.
                if (previous := requests.get(event.request)) is not None:
                    previous.end()
                requests[event.request] = RemoteRequest(event, self._fleet)
            case RequestAnswered() if event.request in requests:
                requests[event.request].on_answered(event, self._fleet)
            case RequestEnded() if event.request in requests:
                requests.pop(event.request).end()
            case _:
                pass


def _started(placement: Placement, now: float, chain_bytes: int) -> RequestStarted:
    """The event for a placement that has not ended; its chain only if it has at most `chain_bytes`
    bytes."""
    decision, request = placement.decision, placement.request
    chain = pack(request.chain) if request is not None else b""
    return RequestStarted(
        request=placement.number,
        decode=placement.decode.name,
        prefill=placement.prefill[0].name if placement.prefill else "",
        prompt_tokens=decision.prompt_tokens,
        cached_tokens=decision.cached_tokens,
        has_first_token=decision.status is not None,
        age=max(0.0, now - decision.decided_at),
        chain=chain if len(chain) <= chain_bytes else b"",
    )
