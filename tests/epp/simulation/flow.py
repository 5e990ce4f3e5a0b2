"""Flow control in simulated time: requests of several tenants and priorities, at overload."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import ceil
from random import Random
from typing import Final, NamedTuple

from tandem_contract.config import FlowControl
from tandem_epp.flow.flows import WENT, Flows
from tandem_epp.flow.requests import Held
from tandem_epp.flow.settings import flow_settings
from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import Arrival, Simulation
from tandem_planner.simulation.measures import Outcome
from tandem_planner.simulation.work import Request

from .real_picker import MODEL, RealPicker

CHECK: Final = 0.01
"""Seconds between two looks at the pods."""
_BYTES_PER_TOKEN: Final = 4


class Sender(NamedTuple):
    """Whose a request is."""

    tenant: str = ""
    priority: int = 0


class FlowGate:
    """The product's flow control before its picker; a `loop.Gate`."""

    def __init__(self, picker: RealPicker, flow: FlowControl | None) -> None:
        """`flow`: None: off."""
        self.senders: dict[Request, Sender] = {}
        self.refused = Counter[str]()
        """Reason → requests that no pod got."""
        self.sender_of: dict[int, Sender] = {}
        """Of each request that was placed, by its index."""
        self.waits: list[float] = []
        """Seconds of those that waited here and went."""
        self.queues: list[int] = []
        """Requests in the engines' own queues, pod by pod, at each look while some wait here."""
        self._picker = picker
        self._flows = Flows[Held](picker.fleet, self._on_flow_end, Random(0))
        self._flows.settings = flow and flow_settings(flow)
        self._held: dict[Held, Arrival] = {}
        self._is_checking = False

    @property
    def served(self) -> Sequence[Outcome]:
        """The requests that were placed."""
        return self._simulation.served

    def start(self, simulation: Simulation) -> None:
        """The simulation begins."""
        self._simulation = simulation

    def meet(self, arrival: Arrival, now: float) -> None:
        """Hold the request, or let it pass."""
        request = arrival.request
        size = request.prompt_tokens * _BYTES_PER_TOKEN
        if not self._flows.must_wait(MODEL, size, now):
            self._place(arrival, now)
            return
        settings = self._flows.settings
        assert settings is not None
        sender = self.senders.get(request, Sender())
        average = self._picker.fleet.figures.output_tokens
        tokens = request.prompt_tokens + min(average, request.output_tokens)
        held = Held(
            MODEL,
            sender.priority,
            sender.tenant,
            now,
            now + self._flows.ttl(MODEL, sender.priority, settings),
            size=size,
            tokens=tokens,
            work=tokens,
            is_split=False,
        )
        if self._flows.passes(held, now):
            self._place(arrival, now)
            return
        self._held[held] = arrival
        if (reason := self._flows.admit(held, settings)) is not None:
            self._refuse(held, reason)
        elif not self._is_checking:
            self._check(now)

    def _place(self, arrival: Arrival, now: float) -> None:
        self.sender_of[len(self.served)] = self.senders.get(arrival.request, Sender())
        self._simulation.place(arrival, now)

    def _check(self, now: float) -> None:
        gone = -1
        while gone != len(self.served):
            gone = len(self.served)
            self._is_checking = self._flows.advance(now, now)
        self.queues += [len(pod.waiting) for pod in self._simulation.pods]
        if self._is_checking:
            self._simulation.at(now + CHECK, lambda: self._check(now + CHECK))

    def _on_flow_end(self, held: Held, reason: str, now: float) -> None:
        if reason != WENT:
            self._refuse(held, reason)
            return
        self.waits.append(now - held.arrived)
        self._picker.subset = held.subset
        self._place(self._held.pop(held), now)
        self._picker.subset = None
        self._flows.placed(held)

    def _refuse(self, held: Held, reason: str) -> None:
        del self._held[held]
        self.refused[reason] += 1
        self._simulation.refuse()


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
) -> FlowGate:
    """Send `loads` for `seconds`."""
    picker = RealPicker(pods, seed=seed)
    simulation = Simulation(pods, picker, gate=(gate := FlowGate(picker, flow)))
    ids = count()
    for number, load in enumerate(loads):
        requests = poisson(
            load.rate, seconds, prompt=prompt, output=output, ids=ids, seed=1000 * seed + number
        )
        for request in requests:
            gate.senders[request] = load.sender
    simulation.run(gate.senders)
    return gate


def served_within(
    gate: FlowGate, begin: float, end: float, of: Callable[[Sender], bool]
) -> list[Outcome]:
    """Requests of these senders whose first token came between `begin` and `end`."""
    return [
        served
        for served in gate.served
        if served.first_token is not None
        and begin <= served.first_token < end
        and of(gate.sender_of[served.work.index])
    ]


def jain(shares: Sequence[float]) -> float:
    """How equal `shares` are: 1 if all are, 1 / n if one has everything (Jain, Chiu, Hawe,
    *A Quantitative Measure of Fairness*, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
