"""All requests that wait: who waits, who goes when, who is refused. No clock, no task: `control`
runs it in a process, and the simulation of the tests in its own time.

One request goes at a time: the next one only when the last one is placed and counts.
"""

from collections.abc import Callable
from random import Random
from typing import Final, Generic, TypeVar

from ..backends.fleet import Fleet
from .detectors import DetectedSaturation
from .elsewhere import NOTHING, Group, Share, WaitingElsewhere, Went
from .queue import FlowQueue
from .rate import Rate
from .requests import Charge, Demand, Held, QueueKey, charge_of
from .saturation import EMPTY_PATIENCE, PATIENCE, Saturation
from .settings import FlowSettings

WENT: Final = "went"
LEFT: Final = "left"
FULL: Final = "flow_full"
DISPLACED: Final = "flow_displaced"
EXPIRED: Final = "flow_expired"
SHED: Final = "flow_shed"
STOPPING: Final = "flow_stopping"

BYTES_PER_TOKEN: Final = 4
"""Of a body that is not read yet."""
H = TypeVar("H", bound=Held)


YIELD_SECONDS: Final = 0.05
"""Seconds for which a request that could go leaves the room to a more important one at another
replica. A replica looks every 10 ms; one that takes nothing for so long cannot."""
_REMEMBERED_SECONDS: Final = 60.0
"""Seconds for which pods are kept free for a priority of which a request came. Shorter: the next
one waits in an engine behind less important ones. Longer: these wait although no other comes."""
LEAD: Final = 4
"""Requests by which the turn of one replica's tenants may be ahead of that of another's, beyond
which it leaves the room to them. Higher: shares are less equal for so many requests. Lower:
replicas wait for each other where nothing is lost if they do not."""
_MOST_BEHIND: Final = 4 * LEAD
"""Requests by which a replica's turn is behind at most: what it could not take is not made up for,
so that what it has claims no more than its share later."""


def shed_share(wait: float, patience: float) -> float:
    """The chance that a request of a negative priority is refused at once: the share of its time,
    `patience` seconds, that it is expected to wait. So they are refused the more, the longer the
    others wait, and not all from one moment on."""
    return min(1.0, wait / patience) if patience > 0 else 1.0


class Flows(Generic[H]):
    """The waiting requests of a fleet. `now` is of the clock of the pods' figures, in Unix seconds;
    arrivals, deadlines and `at` are of one that never jumps."""

    def __init__(
        self, fleet: Fleet, on_end: Callable[[H, str, float], None], random: Random
    ) -> None:
        """`on_end` is called with each request that waits no longer, why, and at what time."""
        self._fleet, self._on_end, self._random = fleet, on_end, random
        self._saturation = Saturation(fleet)
        self._settings: FlowSettings | None = None
        self._charging = FlowSettings()
        """The latest that were not None: what waits is charged by them."""
        self._detected: DetectedSaturation | None = None
        """Where a detector says when pods are saturated."""
        self._priorities: tuple[int, ...] = ()
        """All that are known, the highest first: those of bands, and of requests."""
        self.byte_limit = 1 << 62
        """Bytes of bodies that may wait, whatever the settings say."""
        self.elsewhere = WaitingElsewhere()
        """What waits at other replicas."""
        self.elsewhere.on_news = self._on_news
        self._queues: dict[QueueKey, FlowQueue[H]] = {}
        """Only those with requests."""
        self._resting: dict[QueueKey, tuple[Group, FlowQueue[H]]] = {}
        """Those that had some, while such requests wait at other replicas: what tenants got counts.
        With one of these requests' groups."""
        self._members_version = fleet.members_version
        """Of the pods by which queues are listed."""
        self._going: H | None = None
        """Has its turn and is not placed yet."""
        self._rate = Rate()
        """Of requests that go."""
        self._came: dict[int, float] = {}
        """Priority → when a request of it last came that no pod had room for at once."""
        self._yielding: dict[Group, tuple[float, int]] = {}
        """Group whose next request leaves its room to other replicas' → since when, and how many of
        these had gone then."""
        self.bytes = 0
        """Of the bodies that wait."""
        self.counts: dict[int, int] = {}
        """Priority → requests that wait."""
        self._band_bytes: dict[int, int] = {}
        """Priority → bytes of their bodies."""
        self.demand: dict[str | None, Demand] = {}
        """What waits, by model as `Fleet.model_key` has it."""

    @property
    def settings(self) -> FlowSettings | None:
        """None: no request waits. May be replaced at any time; what waits keeps its deadline."""
        return self._settings

    @settings.setter
    def settings(self, settings: FlowSettings | None) -> None:
        before, self._settings, self._detected = self._charging, settings, None
        self._priorities = ()
        if settings is not None:
            self._charging = settings
            self._recharge(before)
            self._priorities = tuple(sorted({0, *settings.bands, *self.counts}, reverse=True))
            if (detector := settings.detector) is not None:
                self._detected = DetectedSaturation(
                    self._fleet, self._saturation, detector, settings.ceilings
                )

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._queues.values()))

    def has_pods(self, model: str | None) -> bool:
        """Whether any pod is ready for `model`."""
        return bool(self._fleet.ready_pods(model))

    def has_prefill_pods(self, model: str | None) -> bool:
        """Whether a pod is ready that only prefills for `model`."""
        return self._saturation.has_prefill_pods(model)

    def must_wait(
        self, model: str | None, size: int, now: float, hint: frozenset[str] | None = None
    ) -> bool:
        """Whether a request for `model` whose body has `size` bytes may have to wait. `hint`: as
        `Held.hint`."""
        if self.settings is None:
            return False
        if not self.has_pods(model):
            return self.settings.no_endpoint_ttl > 0.0 and self._may_come(model, now)
        if self._queues or self._going is not None or hint is not None:
            return True
        if not self.elsewhere.is_empty:
            # Perhaps for the same pods.
            return True
        if self._detected is not None:
            return not self._detected.has_room(model, self._priorities, now)
        tokens = size / BYTES_PER_TOKEN + self._fleet.figures.output_tokens
        return not self._saturation.has_room(model, tokens, now)

    def ttl(self, model: str | None, priority: int, settings: FlowSettings) -> float:
        """Seconds that a request of `priority` may wait now."""
        return settings.band(priority).ttl if self.has_pods(model) else settings.no_endpoint_ttl

    def passes(self, held: H, now: float) -> bool:
        """Whether `held` goes at once: nothing waits that may come before it, and a pod has
        room."""
        self._came[held.priority] = held.arrived
        if self._queues or self._going is not None:
            return False
        held.group = self._group(held)
        if self.elsewhere.has(held.group, held.priority):
            return False
        return self._may_go(held, now, self._patience(held))

    def _patience(self, held: H) -> float:
        """Seconds of prompts ahead with which a pod has room for `held`, which finds that nothing
        of its priority or a higher one waits."""
        # In an engine's own queue it would be before the more important that come next.
        is_highest = not any(
            priority > held.priority and held.arrived - at < _REMEMBERED_SECONDS
            for priority, at in self._came.items()
        )
        if not is_highest or self.elsewhere.has(held.group):
            return PATIENCE
        return max(PATIENCE, min(EMPTY_PATIENCE, held.deadline - held.arrived))

    def admit(self, held: H, settings: FlowSettings) -> str | None:
        """Let `held` wait, or say why not."""
        self._follow_pods()
        held.group = self._group(held)
        if self._is_full(held, settings):
            return FULL
        if settings.is_shedding and self._is_shed(held):
            return SHED
        excess = self._excess_bytes(held, settings)
        if excess > 0 and not (settings.displace and self._displace(held, excess)):
            return FULL
        held.tenant, held.cost = self._charge(held.priority, held.sender, held.work)
        held.key = self._key(held.model, is_split=held.is_split)
        if (queue := self._queues.get(held.key)) is None:
            _, queue = self._resting.pop(held.key, (held.group, FlowQueue()))
            self._queues[held.key] = queue
        queue.add(held, self.elsewhere.latest_turn(held.group))
        self.bytes += held.size
        self.counts[held.priority] = self.counts.get(held.priority, 0) + 1
        self._band_bytes[held.priority] = self._band_bytes.get(held.priority, 0) + held.size
        self._tell(held, 1)
        self._count_demand(held, 1)
        return None

    def advance(self, now: float, at: float) -> bool:
        """Refuse those whose time is over, and let the next request go if there is room. Returns
        whether it is worth to ask again without anything having happened."""
        self._follow_pods()
        for held in [held for queue in self._queues.values() for held in queue.expired(at)]:
            self._end(held, EXPIRED, at)
        if self._going is not None:
            return False
        firsts = [first for queue in self._queues.values() if (first := queue.first()) is not None]
        # The important before those that other queues have, too: they may need the same pods.
        for first in sorted(firsts, key=lambda held: (-held.priority, held.order)):
            if self._may_go(first, now) and not self._yields(first, at):
                self._queues[first.key].take_first()
                self._going = first
                self._rate.add(at)
                self._end(first, WENT, at)
                return False
        return bool(firsts)

    def placed(self, held: H) -> None:
        """What went is placed, or will not be."""
        if self._going is held:
            self._going = None

    def leave(self, held: H, at: float) -> None:
        """The client has left. Without effect if the request waits no longer."""
        self._end(held, LEFT, at)
        self.placed(held)

    def stop(self, at: float) -> None:
        """Refuse all."""
        for held in [held for queue in self._queues.values() for held in queue.all()]:
            self._end(held, STOPPING, at)

    def expected_wait(self, held: H) -> float:
        """Seconds that a request like `held` waits that comes now; 0 as long as nothing tells."""
        rate = self._rate.per_second(held.arrived)
        ahead = sum(queue.ahead(held.priority) for queue in self._queues.values())
        return ahead / rate if rate else 0.0

    def _is_shed(self, held: H) -> bool:
        """Whether a request of a negative priority is refused at once, although it has a place."""
        if held.priority >= 0:
            return False
        patience = held.deadline - held.arrived
        return self._random.random() < shed_share(self.expected_wait(held), patience)

    def _displace(self, held: H, excess: int) -> bool:
        """Refuse requests of the lowest priorities, below that of `held`, whose bodies have
        `excess` bytes; returns whether they have."""
        below = [item for queue in self._queues.values() for item in queue.all()]
        below = [item for item in below if item.priority < held.priority]
        if sum(item.size for item in below) < excess:
            return False
        # The newest of the lowest priority first.
        for item in sorted(below, key=lambda item: (item.priority, -item.arrived)):
            if excess > 0:
                excess -= item.size
                self._end(item, DISPLACED, held.arrived)
        return True

    def _may_come(self, model: str | None, now: float) -> bool:
        """Whether a pod for `model` may come: otherwise the request is refused at once."""
        fleet = self._fleet
        return model is None or fleet.can_serve(model) or fleet.was_removed_recently(model, now)

    def _may_go(self, held: H, now: float, patience: float = PATIENCE) -> bool:
        held.subset = None
        if self.settings is None:
            return True
        if not self.has_pods(held.model):
            return self.settings.no_endpoint_ttl == 0.0 or not self._may_come(held.model, now)
        if self._detected is not None:
            return self._may_go_by_detector(self._detected, held, now)
        pods = self._saturation.pods_with_room(
            held.model,
            held.tokens,
            now,
            is_split=held.is_split,
            hint=held.hint,
            patience=patience,
        )
        # The choice would weigh a pod with a long queue against the harm that is done elsewhere.
        held.subset = frozenset([pod.address for pod in pods if pod.address is not None])
        return bool(pods)

    def _may_go_by_detector(self, detected: DetectedSaturation, held: H, now: float) -> bool:
        if held.priority not in self._priorities:
            known = (*self._priorities, held.priority)
            self._priorities = tuple(sorted(known, reverse=True))
        pods = detected.pods_with_room(held.model, held.priority, self._priorities, now, held.hint)
        if len(pods) == 1:
            held.subset = frozenset([str(pods[0].address)])
        return bool(pods)

    def _count_demand(self, held: H, change: int) -> None:
        requests, tokens = self.demand.get(held.group.model, Demand(0, 0.0))
        requests += change
        # No rounding is left behind.
        tokens = tokens + change * held.tokens if requests else 0.0
        self.demand[held.group.model] = Demand(requests, tokens)

    def _is_full(self, held: H, settings: FlowSettings) -> bool:
        """Whether as many requests wait, here and at other replicas, or as many bytes of the
        priority, as may."""
        band, priority, others = settings.band(held.priority), held.priority, self.elsewhere
        part, same = others.part(), others.total(priority, priority)
        size = self._band_bytes.get(priority, 0) + same.size + held.size
        return (
            self.counts.get(priority, 0) + same.requests >= band.max_requests * part
            or size > band.max_bytes * part
            or self.waiting + others.total().requests >= settings.max_requests * part
        )

    def _excess_bytes(self, held: H, settings: FlowSettings) -> int:
        """Bytes of bodies by which `held` is too much for the fleet, or for this process."""
        others = self.elsewhere
        # Those of a lower priority at other replicas are not displaced from here: they take no
        # place.
        taken = others.total(held.priority if settings.displace else None)
        most = min(int(settings.max_bytes * others.part()) - taken.size, self.byte_limit)
        return self.bytes + held.size - most

    def _yields(self, first: H, at: float) -> bool:
        """Whether `first` leaves its room to a request at another replica that comes before it."""
        queue = self._queues[first.key]
        ahead = LEAD * queue.largest_cost(first.priority)
        gone = self.elsewhere.gone_before(first.group, queue.turn(first.priority) - ahead)
        if gone is None:
            self._yielding.pop(first.group, None)
            return False
        # As long as some of those go, there is room for them.
        since, before = self._yielding.get(first.group, (at, -1))
        if gone != before:
            since = at
            self._yielding[first.group] = at, gone
        return at - since < YIELD_SECONDS

    def _tell(self, held: H, change: int, went: Went | None = None) -> None:
        """Other replicas hear that `change` more requests like `held` wait here."""
        group, queue = held.group, self._queues.get(held.key)
        requests, size, _ = self.elsewhere.own.get(group, NOTHING)
        turn = queue.turn(held.priority) if queue is not None else 0.0
        share = Share(requests + change, size + change * held.size, turn)
        if not share.requests:
            self._yielding.pop(group, None)
        self.elsewhere.tell(group, share, went)

    def _on_news(self, group: Group, share: Share, went: Went | None) -> None:
        """Another replica has told what waits there."""
        self._follow_pods()
        self._rest(group)
        key, priority = self._key(group.model, is_split=group.is_split), group.priority
        if went is not None and (charged := self._queues.get(key) or self._rested(key)) is not None:
            charged.charge(priority, *self._charge(priority, *went))
        if (queue := self._queues.get(key)) is None:
            return
        if not (cost := queue.largest_cost(priority)):
            return
        if share.requests:
            queue.keep_up(priority, share.turn - _MOST_BEHIND * cost)
        own, turn = self.elsewhere.own.get(group, NOTHING), queue.turn(priority)
        if own.requests and abs(turn - own.turn) > LEAD * cost / 2:
            self.elsewhere.tell(group, own._replace(turn=turn))

    def _follow_pods(self) -> None:
        """What needs the same pods waits in one queue, also after these have changed."""
        if self._members_version == (version := self._fleet.members_version):
            return
        self._members_version = version
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            by_key: dict[QueueKey, list[H]] = {}
            for held in queue.all():
                held.key = self._key(held.model, is_split=held.is_split)
                by_key.setdefault(held.key, []).append(held)
            kept = next((key for key in by_key if key not in self._queues), None)
            for key, items in by_key.items():
                if key == kept:
                    self._queues[key] = queue
                    continue
                other = self._queues.setdefault(key, FlowQueue())
                for held in sorted(items, key=lambda held: held.number):
                    queue.remove(held)
                    other.add(held, self.elsewhere.latest_turn(held.group))
        resting, self._resting = self._resting, {}
        for group, queue in resting.values():
            key = self._key(group.model, is_split=group.is_split)
            if key not in self._queues:
                self._resting[key] = group, queue

    def _recharge(self, before: FlowSettings) -> None:
        """Shares are counted by what the settings say now, not by `before`."""
        queues = [*self._queues.values(), *(queue for _, queue in self._resting.values())]
        for queue in queues:
            for priority in queue.priorities:
                if before.band(priority).fairness == self._charging.band(priority).fairness:
                    continue
                for held in queue.restart(priority):
                    held.tenant, held.cost = self._charge(priority, held.sender, held.work)
                    queue.add(held)

    def _charge(self, priority: int, sender: str, work: float) -> Charge:
        return charge_of(self._charging.band(priority), sender, work)

    def _key(self, model: str | None, *, is_split: bool) -> QueueKey:
        """The queue of requests for `model`."""
        pods = self._fleet.ready_pods(model)
        return pods, None if pods else self._fleet.model_key(model), is_split

    def _rested(self, key: QueueKey) -> FlowQueue[H] | None:
        return self._resting[key][1] if key in self._resting else None

    def _rest(self, group: Group) -> None:
        """Forget what tenants got of requests like `group` if none of these waits elsewhere."""
        if self._resting and not self.elsewhere.has(group):
            self._resting = {
                key: (other, queue)
                for key, (other, queue) in self._resting.items()
                if (other.model, other.is_split) != (group.model, group.is_split)
            }

    def _group(self, held: H) -> Group:
        return Group(self._fleet.model_key(held.model), held.priority, held.is_split)

    def _end(self, held: H, reason: str, at: float) -> None:
        if held.has_ended:
            return
        held.has_ended = True
        # Those of a queue that expire together have left it together.
        if (queue := self._queues.get(held.key)) is not None:
            queue.remove(held)
            if not len(queue):
                del self._queues[held.key]
                if self.elsewhere.has(held.group):
                    self._resting[held.key] = held.group, queue
        self.bytes -= held.size
        self.counts[held.priority] -= 1
        self._band_bytes[held.priority] -= held.size
        self._tell(held, -1, Went(held.sender, held.work) if reason == WENT else None)
        self._count_demand(held, -1)
        self._on_end(held, reason, at)
