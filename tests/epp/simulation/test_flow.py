"""Flow control at twice what the pods can compute, in simulated time."""

from collections import Counter
from itertools import count

import pytest

from tandem_contract.config import FlowControl
from tandem_contract.slo import Slo as StatedSlo
from tandem_planner.simulation.loop import Simulation
from tandem_planner.simulation.measures import Slo, percentile

from .flow import FlowGate, Load, Sender, jain, poisson, run, served_within
from .pods import engines
from .real_picker import RealPicker

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = [pytest.mark.interpreted, pytest.mark.long]

ON = FlowControl(enabled=True, ttl=600.0)
SECONDS = 60.0
RATE = 52.0
"""Requests per second, of which the pods compute about 26."""
IMPORTANT = Sender("important", 1)


def sent(flow: FlowControl | None, *loads: Load) -> FlowGate:
    return run(engines(4, seed=1), loads, flow, seconds=SECONDS, output=60)


def ttft(gate: FlowGate) -> list[float]:
    """TTFT of the important requests."""
    served = served_within(gate, 10.0, SECONDS, lambda sender: sender.priority == 1)
    return [each.ttft for each in served]


def tokens(gate: FlowGate) -> int:
    """Tokens of requests that ended while all pods were loaded."""
    within = (s.work for s in gate.served if s.ended and 10.0 <= s.ended < SECONDS)
    return sum(work.prompt_tokens + work.output_tokens for work in within)


def test_the_important_hardly_wait_and_the_pods_compute_as_much() -> None:
    important = Load(IMPORTANT, 0.1 * RATE)
    both = important, Load(Sender("others"), 0.9 * RATE)
    alone = sent(None, important)
    off = sent(None, *both)
    on = sent(ON, *both)
    assert percentile(ttft(on), 99) <= 1.5 * percentile(ttft(alone), 99)
    assert percentile(ttft(off), 99) >= 5 * percentile(ttft(on), 99)
    assert tokens(on) >= 0.95 * tokens(off)
    # The engines' own queues stay short.
    assert sum(on.queues) <= 2 * len(on.queues)
    assert not on.refused


@pytest.mark.parametrize("fairness", ["requests", "tokens"])
def test_a_noisy_tenant_gets_what_the_others_get(fairness: str) -> None:
    tenants = [f"tenant {number}" for number in range(20)]
    loads = [Load(Sender(tenant), RATE / 30) for tenant in tenants]
    noisy = Load(Sender("noisy"), RATE / 3)

    def shares(flow: FlowControl | None) -> float:
        gate = sent(flow, *loads, noisy)
        got = Counter[str]()
        for served in served_within(gate, 20.0, SECONDS, lambda _: True):
            cost = served.work.prompt_tokens if fairness == "tokens" else 1
            got[gate.sender_of[served.work.index].tenant] += cost
        return jain([got[tenant] for tenant in (*tenants, "noisy")])

    assert shares(None) < 0.7
    assert shares(FlowControl(enabled=True, ttl=20.0, fairness=fairness)) >= 0.95  # type: ignore[arg-type]


def test_with_an_itl_objective_requests_wait_here_while_answers_would_be_late() -> None:
    """Prompts without a pause between them would let no answer beside them be in time."""
    slo, pods = Slo(ttft=2.0, itl=0.05), 4

    def in_time(flow: FlowControl | None) -> float:
        """Answers per second that meet both."""
        router = RealPicker(made := engines(pods, seed=1), seed=1)
        router.meet(StatedSlo(slo.ttft, slo.itl))
        simulation = Simulation(made, router, gate=FlowGate(router, flow))
        requests = poisson(RATE, SECONDS, prompt=1500, output=60, ids=count(), seed=1)
        return sum(served.meets(slo) for served in simulation.run(requests).served) / SECONDS

    alone = in_time(None)
    assert in_time(FlowControl(enabled=True, ttl=0.5)) > max(3 * alone, 0.2 * RATE)
