"""All requests that wait, model by model: who waits, who goes when, who is refused. No clock, no
task: `control` runs it in a process, and the simulation of the tests in its own time.

Of a model one request goes at a time: the next one only when the last one is placed and counts.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Final, Generic, TypeVar

from tandem_contract.config import FlowControl

from ..backends.fleet import Fleet
from .elsewhere import Group, WaitingElsewhere
from .queue import FlowQueue, Waiting
from .rate import Rate
from .saturation import Saturation

WENT: Final = "went"
LEFT: Final = "left"
FULL: Final = "flow_full"
DISPLACED: Final = "flow_displaced"
EXPIRED: Final = "flow_expired"
SHED: Final = "flow_shed"
STOPPING: Final = "flow_stopping"

BYTES_PER_TOKEN: Final = 4
"""Of a body that is not read yet."""


class Held(Waiting):
    """A request that waits for pods of one model."""

    __slots__ = ("group", "has_ended", "is_split", "model", "subset", "tokens")

    def __init__(
        self,
        model: str | None,
        priority: int,
        tenant: str,
        arrived: float,
        deadline: float,
        *,
        size: int,
        tokens: float,
        cost: float,
        is_split: bool,
    ) -> None:
        """`model`: as `Fleet.model_key` has it; `tokens`: of prompt and answer; `is_split`: whether
        it needs a prefill pod."""
        super().__init__(priority, tenant, arrived, deadline, size=size, cost=cost)
        self.model, self.tokens, self.is_split = model, tokens, is_split
        self.has_ended = False
        """Whether it waits no longer."""
        self.group = Group(model, priority, is_split)
        self.subset: frozenset[str] | None = None
        """Once it goes: the addresses of the pods that have room for it; None: any may get it."""


H = TypeVar("H", bound=Held)


class _ModelFlow(Generic[H]):
    """The requests of one model."""

    def __init__(self) -> None:
        self.queues = FlowQueue[H](), FlowQueue[H]()
        """Of requests that need no prefill pod, and of those that do: neither waits for what only
        the other one needs."""
        self.going: H | None = None
        """Has its turn and is not placed yet."""
        self.rate = Rate()
        """Of requests that go."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(map(len, self.queues))

    def firsts(self) -> list[H]:
        """The requests that may go next, the more important one first."""
        firsts = [first for queue in self.queues if (first := queue.first()) is not None]
        return sorted(firsts, key=lambda held: (-held.priority, held.arrived))


class Flows(Generic[H]):
    """The waiting requests of a fleet. Times are in seconds of one clock."""

    def __init__(
        self, fleet: Fleet, on_end: Callable[[H, str, float], None], random: Random
    ) -> None:
        """`on_end` is called with each request that waits no longer, why, and when."""
        self._fleet, self._on_end, self._random = fleet, on_end, random
        self._saturation = Saturation(fleet)
        self.settings: FlowControl | None = None
        """None: no request waits. May be replaced at any time; what waits keeps its deadline."""
        self.byte_limit = 1 << 62
        """Bytes of bodies that may wait, whatever the settings say."""
        self.elsewhere = WaitingElsewhere()
        """What waits at other replicas."""
        self._flows: dict[str | None, _ModelFlow[H]] = {}
        """Only models with requests that wait or go."""
        self.bytes = 0
        """Of the bodies that wait."""
        self.counts: dict[int, int] = {}
        """Priority → requests that wait, over all models."""

    def key(self, model: str | None) -> str | None:
        """What tells the models' flows apart: clients cannot make up more."""
        return self._fleet.model_key(model) if self._fleet.has_mixed_models else None

    def has_pods(self, model: str | None) -> bool:
        """Whether a pod is ready that may decode for `model`."""
        return self._saturation.has_pods(model)

    def has_prefill_pods(self, model: str | None) -> bool:
        """Whether a pod is ready that only prefills for `model`."""
        return self._saturation.has_prefill_pods(model)

    def must_wait(self, model: str | None, size: int, now: float) -> bool:
        """Whether a request for `model` whose body has `size` bytes cannot be placed at once."""
        if self.settings is None:
            return False
        key = self.key(model)
        if key in self._flows:
            return True
        if not self.has_pods(key):
            return self.settings.no_endpoint_ttl > 0.0 and self._may_come(model)
        tokens = size / BYTES_PER_TOKEN + self._fleet.figures.output_tokens
        return not self._saturation.has_room(key, tokens, now)

    def ttl(self, model: str | None, priority: int, settings: FlowControl) -> float:
        """Seconds that a request of `priority` may wait now."""
        return settings.band(priority).ttl if self.has_pods(model) else settings.no_endpoint_ttl

    def admit(self, held: H, settings: FlowControl) -> str | None:
        """Let `held` wait, or say why not."""
        flow = self._flows.get(held.model) or _ModelFlow[H]()
        waiting = self.counts.get(held.priority, 0)
        in_fleet = waiting + self.elsewhere.requests(held.priority)
        if in_fleet >= settings.band(held.priority).max_requests:
            return FULL
        if held.priority < 0 and self._random.random() < self._shed_share(flow, held):
            return SHED
        while self.bytes + held.size > min(settings.max_bytes, self.byte_limit):
            lowest = [queue.lowest(held.priority) for queue in self._queues()]
            lower = min(filter(None, lowest), key=lambda other: other.priority, default=None)
            if lower is None or not settings.displace:
                return FULL
            self._end(lower, DISPLACED, held.arrived)
        self._flows[held.model] = flow
        queue = flow.queues[held.is_split]
        queue.is_by_deadline = settings.order == "deadline"
        queue.add(held)
        self.bytes += held.size
        self.counts[held.priority] = waiting + 1
        self.elsewhere.count(held.group, 1)
        return None

    def advance(self, model: str | None, now: float) -> bool:
        """Refuse those whose time is over, and let the next request go if there is room. Returns
        whether it is worth to ask again without anything having happened."""
        if (flow := self._flows.get(model)) is None:
            return False
        for held in [held for queue in flow.queues for held in queue.expired(now)]:
            self._end(held, EXPIRED, now)
        if flow.going is not None:
            return False
        for first in flow.firsts():
            if not self.elsewhere.has_more_important(first.group) and self._may_go(first, now):
                flow.queues[first.is_split].take_first()
                flow.going = first
                flow.rate.add(now)
                self._end(first, WENT, now)
                return False
        self._forget(model, flow)
        return flow.waiting > 0

    def placed(self, held: H) -> None:
        """What went is placed, or will not be."""
        flow = self._flows.get(held.model)
        if flow is not None and flow.going is held:
            flow.going = None
            self._forget(held.model, flow)

    def leave(self, held: H, now: float) -> None:
        """The client has left. Without effect if the request waits no longer."""
        self._end(held, LEFT, now)
        self.placed(held)

    def stop(self, now: float) -> None:
        """Refuse all."""
        for held in [held for queue in self._queues() for held in queue.all()]:
            self._end(held, STOPPING, now)

    @property
    def models(self) -> list[str | None]:
        """Those with requests that wait or go."""
        return list(self._flows)

    def expected_wait(self, held: H) -> float:
        """Seconds that a request like `held` waits that comes now; 0 as long as nothing tells."""
        return self._wait(self._flows.get(held.model) or _ModelFlow[H](), held)

    def _wait(self, flow: _ModelFlow[H], held: H) -> float:
        rate = flow.rate.per_second(held.arrived)
        return sum(queue.ahead(held.priority) for queue in flow.queues) / rate if rate else 0.0

    def _shed_share(self, flow: _ModelFlow[H], held: H) -> float:
        """The chance that a request of a negative priority is refused at once, although it has a
        place: the share of its time that it would wait. So they are refused the more, the longer
        the others wait, and not all from one moment on."""
        patience = held.deadline - held.arrived
        return self._wait(flow, held) / patience if patience > 0 else 1.0

    def _queues(self) -> Iterator[FlowQueue[H]]:
        return (queue for flow in self._flows.values() for queue in flow.queues)

    def _may_come(self, model: str | None) -> bool:
        """Whether a pod for `model` may come: otherwise the request is refused at once."""
        return model is None or self._fleet.can_serve(model)

    def _may_go(self, held: H, now: float) -> bool:
        held.subset = None
        if self.settings is None:
            return True
        if not self.has_pods(held.model):
            return self.settings.no_endpoint_ttl == 0.0 or not self._may_come(held.model)
        pods = self._saturation.pods_with_room(held.model, held.tokens, now, is_split=held.is_split)
        # The choice would weigh a pod with a long queue against the harm that is done elsewhere.
        held.subset = frozenset(pod.address for pod in pods if pod.address)
        return bool(pods)

    def _end(self, held: H, reason: str, now: float) -> None:
        if held.has_ended:
            return
        held.has_ended = True
        flow = self._flows[held.model]
        flow.queues[held.is_split].remove(held)
        self.bytes -= held.size
        self.counts[held.priority] -= 1
        self.elsewhere.count(held.group, -1)
        self._on_end(held, reason, now)
        self._forget(held.model, flow)

    def _forget(self, model: str | None, flow: _ModelFlow[H]) -> None:
        """Forget a model of which nothing waits or goes."""
        if not flow.waiting and flow.going is None:
            self._flows.pop(model, None)
