"""Flow control in simulated time: requests of several tenants and priorities, at overload."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from random import Random
from typing import Final, NamedTuple

from tandem_contract.config import FlowControl
from tandem_epp.flow.flows import WENT, Flows, Held
from tandem_epp.flow.settings import flow_settings
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine

from .real_picker import MODEL, RealPicker
from .run import Result, Served, Simulation
from .workload import Request

CHECK: Final = 0.01
"""Seconds between two looks at the pods."""
_BYTES_PER_TOKEN: Final = 4


class Sender(NamedTuple):
    """Whose a request is."""

    tenant: str = ""
    priority: int = 0


@dataclass(eq=False)
class FlowSimulation(Simulation):
    """A simulation whose picker has flow control."""

    flow: FlowControl | None = None
    """None: off."""
    senders: dict[Request, Sender] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    """Reason → requests that no pod got."""
    sender_of: dict[int, Sender] = field(default_factory=dict)
    """Of each request that was placed, by its index."""
    waits: list[float] = field(default_factory=list)
    """Seconds of those that waited here and went."""
    queues: list[int] = field(default_factory=list)
    """Requests in the engines' own queues, pod by pod, at each look while some wait here."""

    def __post_init__(self) -> None:
        assert isinstance(self.router, RealPicker)
        self.picker = self.router
        self._flows = Flows[Held](self.picker.fleet, self._on_flow_end, Random(0))
        self._flows.settings = self.flow and flow_settings(self.flow)
        self._fleet = self.picker.fleet
        self._held: dict[Held, tuple[Request, int, float]] = {}
        self._is_checking = False

    def _place(self, request: Request, replica: int, sent: float, now: float) -> None:
        size = request.prompt_tokens * _BYTES_PER_TOKEN
        if not self._flows.must_wait(MODEL, size, now):
            self._place_now(request, replica, sent, now)
            return
        settings = self._flows.settings
        assert settings is not None
        sender = self.senders.get(request, Sender())
        tokens = request.prompt_tokens + min(
            self._fleet.figures.output_tokens, request.output_tokens
        )
        held = Held(
            MODEL,
            sender.priority,
            sender.tenant,
            now,
            now + self._flows.ttl(MODEL, sender.priority, settings),
            size=size,
            tokens=tokens,
            cost=tokens if settings.default.fairness == "tokens" else 1.0,
            is_split=False,
        )
        if self._flows.passes(held, now):
            self._place_now(request, replica, sent, now)
            return
        self._held[held] = request, replica, sent
        if (reason := self._flows.admit(held, settings)) is not None:
            self._refuse(held, reason)
        elif not self._is_checking:
            self._check(now)

    def _place_now(self, request: Request, replica: int, sent: float, now: float) -> None:
        self.sender_of[len(self.served)] = self.senders.get(request, Sender())
        super()._place(request, replica, sent, now)

    def _check(self, now: float) -> None:
        gone = -1
        while gone != len(self.served):
            gone = len(self.served)
            self._is_checking = self._flows.advance(now, now)
        self.queues += [len(pod.waiting) for pod in self.pods]
        if self._is_checking:
            self.at(now + CHECK, lambda: self._check(now + CHECK))

    def _on_flow_end(self, held: Held, reason: str, now: float) -> None:
        if reason != WENT:
            self._refuse(held, reason)
            return
        request, replica, sent = self._held.pop(held)
        self.waits.append(now - held.arrived)
        self.picker.subset = held.subset
        self._place_now(request, replica, sent, now)
        self.picker.subset = None
        self._flows.placed(held)

    def _refuse(self, held: Held, reason: str) -> None:
        del self._held[held]
        self.refused[reason] += 1
        self._unfinished -= 1


def poisson(
    rate: float, seconds: float, *, prompt: int, output: int, ids: Iterator[int], seed: int
) -> list[Request]:
    """Requests without a common prefix; `prompt` and `output`: mean tokens, exponential."""
    random, at, requests = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds:
        tokens = 1 + int(random.expovariate(1 / prompt))
        answer = 1 + int(random.expovariate(1 / output))
        blocks = tuple(next(ids) for _ in range(ceil(tokens / BLOCK)))
        requests.append(Request(at, tokens, answer, blocks))
    return requests


class Load(NamedTuple):
    """The requests of one sender."""

    sender: Sender
    rate: float
    """Per second."""


def run(
    pods: Sequence[Engine],
    loads: Sequence[Load],
    flow: FlowControl | None,
    *,
    seconds: float = 120.0,
    prompt: int = 1500,
    output: int = 200,
    seed: int = 1,
) -> tuple[Result, FlowSimulation]:
    """Send `loads` for `seconds`."""
    simulation = FlowSimulation(pods, RealPicker(pods, seed=seed), flow=flow)
    ids = count()
    for number, load in enumerate(loads):
        requests = poisson(
            load.rate, seconds, prompt=prompt, output=output, ids=ids, seed=1000 * seed + number
        )
        for request in requests:
            simulation.senders[request] = load.sender
            simulation.send(request, request.at)
    return simulation.run(), simulation


def served_within(
    simulation: FlowSimulation, begin: float, end: float, of: Callable[[Sender], bool]
) -> list[Served]:
    """Requests of these senders whose first token came between `begin` and `end`."""
    return [
        served
        for served in simulation.served
        if served.first_token is not None
        and begin <= served.first_token < end
        and of(simulation.sender_of[served.work.index])
    ]


def jain(shares: Sequence[float]) -> float:
    """How equal `shares` are: 1 if all are, 1 / n if one has everything (Jain, Chiu, Hawe,
    *A Quantitative Measure of Fairness*, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
