"""Flow control at overload, in simulated time: who waits, who is served, and what it costs.

    python -m benchmarks.flow [--seeds 3] [--seconds 120] [--trace FILE] [--json FILE]
    python -m benchmarks.flow --live [--part overload ...] [--json FILE]

Four pods of about 8 billion parameters, whose speeds differ by up to 30 %, get twice what they can
compute: prompts of 1,500 tokens and answers of 60 on average, both exponential, without common
prefixes, as Poisson processes. The picker and flow control are the product's; the engines, the
network and the clock are simulated (`tests/epp/simulation`). What it costs to ask whether a pod has
room is measured for real.

With objectives, `--trace FILE` (else made-up conversations) comes up to four times as fast to ten
pods: answers per second that meet them, with flow control and without.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from time import process_time
from typing import Final

import click
from tests.epp.simulation.flow import FlowGate, Load, Sender, jain, run, served_within
from tests.epp.simulation.pods import engines
from tests.epp.simulation.real_picker import RealPicker

from tandem_contract.config import Backend, FlowControl
from tandem_contract.slo import Slo as StatedSlo
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.flow.flows import Flows
from tandem_epp.flow.requests import Held
from tandem_epp.flow.settings import flow_settings
from tandem_planner.simulation.loop import Simulation
from tandem_planner.simulation.measures import Slo, percentile

from . import flow_live
from .figures import Figure, at_least, at_most, progress, report, without_target
from .routing_load import Load as Conversations
from .routing_rivals import UNIFIED

RATE: Final = 52.0
"""Requests per second: twice what the pods compute."""
HIGH: Final = Sender("interactive", 10)
LOW: Final = Sender("batch")
TENANTS: Final = 50
OUTPUT: Final = 60
ON: Final = FlowControl(enabled=True, ttl=600.0)
PATIENT: Final = 20.0
"""Seconds that requests of the tenants wait at most, so that all lose some."""
_WARM: Final = 20.0
"""Seconds until the pods are full, which are not counted."""
_QUICK: Final = 0.005
_PODS: Final = 100
_SPEEDS: Final = (1.0, 1.5, 2.0, 2.5, 3.0)
_BEYOND: Final = 3.0
_CONVERSATIONS: Final = 4000


@click.command()
@click.option("--seeds", default=3, show_default=True, help="Speeds of pods and arrivals.")
@click.option("--seconds", default=120.0, show_default=True, help="Simulated, each run.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--live", is_flag=True, help="Real EPPs behind a real Envoy instead: `flow_live`.")
@click.option("--part", "parts", multiple=True, help="With --live: only this part; repeatable.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write all figures here.")
def main(
    seeds: int,
    seconds: float,
    *,
    trace: Path | None,
    live: bool,
    parts: Sequence[str],
    file: Path | None,
) -> None:
    """Measure flow control in simulated time."""
    if live:
        report(flow_live.measure(parts), file)
        return
    at_load = [*overload(seeds, seconds), *fairness(seeds, seconds), *idle(seeds, seconds)]
    report([*at_load, *objectives(seeds, trace)], file)


def overload(seeds: int, seconds: float) -> list[Figure]:
    """A tenth of the requests is more important than the others."""
    waits, throughput, queues, without = [], [], [], []
    for seed in range(1, seeds + 1):
        progress(f"overload, seed {seed} of {seeds}")
        high, low = Load(HIGH, 0.1 * RATE), Load(LOW, 0.9 * RATE)
        alone = _ttft(_run((high,), None, seed, seconds), seconds)
        off, on = (_run((high, low), flow, seed, seconds) for flow in (None, ON))
        waits.append(_ttft(on, seconds) / alone)
        without.append(_ttft(off, seconds) / alone)
        throughput.append(_tokens(on, seconds) / _tokens(off, seconds))
        queues.append(sum(on.queues) / len(on.queues))
    return [
        at_most("p99 TTFT of the important, over that when they are alone", waits, "x", 1.3),
        without_target("the same without flow control", without, "x"),
        at_least("tokens computed, over those without flow control", throughput, "x", 0.98),
        at_most("requests in an engine's own queue, mean", queues, "", 2),
    ]


def fairness(seeds: int, seconds: float) -> list[Figure]:
    """Fifty tenants, one of which sends ten times as much as each other one."""
    shares: dict[str, list[float]] = {"off": [], "requests": [], "tokens": []}
    unit = RATE / (TENANTS + 9)
    loads = [Load(Sender(f"tenant {number}"), unit) for number in range(1, TENANTS)]
    loads.append(Load(Sender("noisy"), 10 * unit))
    for seed in range(1, seeds + 1):
        progress(f"tenants, seed {seed} of {seeds}")
        for fair, indexes in shares.items():
            flow = None if fair == "off" else _flow(fair)
            gate = _run(loads, flow, seed, seconds)
            got = Counter[str]()
            for served in served_within(gate, _WARM, seconds, lambda _: True):
                tokens = served.work.prompt_tokens if fair == "tokens" else 1
                got[gate.sender_of[served.work.index].tenant] += tokens
            indexes.append(jain([got[load.sender.tenant] for load in loads]))
    return [
        at_least("Jain's index of requests, one tenant noisy", shares["requests"], "", 0.95),
        at_least("Jain's index of tokens, where tokens are shared", shares["tokens"], "", 0.95),
        without_target("Jain's index without flow control", shares["off"], ""),
    ]


def idle(seeds: int, seconds: float) -> list[Figure]:
    """At 70 % of what the pods compute, and what is asked for each request."""
    held, mean, late = [], [], []
    for seed in range(1, seeds + 1):
        progress(f"70 % load, seed {seed} of {seeds}")
        off, on = (_run((Load(HIGH, 0.35 * RATE),), flow, seed, seconds) for flow in (None, ON))
        held.append(100 * sum(wait > _QUICK for wait in on.waits) / len(on.served))
        mean.append(_ttft_mean(on) / _ttft_mean(off))
        late.append(_ttft(on, seconds) / _ttft(off, seconds))
    return [
        without_target("held for more than 5 ms at 70 % load", held, "%"),
        at_most("mean TTFT at 70 % load, over that without flow control", mean, "x", 1.05),
        at_most("p99 TTFT at 70 % load, over that without flow control", late, "x", 1.05),
        at_most(f"looking for room among {_PODS} pods, interpreted", _look_seconds(), "µs", 5),
    ]


def objectives(seeds: int, trace: Path | None) -> list[Figure]:
    """Ten pods and ever more conversations, whose requests are to meet a TTFT and an ITL."""
    figures = list[Figure]()
    for slo in UNIFIED.slos:
        ratios = []
        for seed in range(seeds):
            progress(f"{slo.text}, seed {seed + 1} of {seeds}")
            off = {speed: _in_time(slo, trace, speed, seed, None) for speed in _SPEEDS}
            flow = FlowControl(enabled=True, ttl=(slo.ttft or 0.0) / 4)
            on = _in_time(slo, trace, _BEYOND, seed, flow)
            ratios.append(on / max(off.values()))
            rates = ", ".join(f"{rate:.2f} at {speed:g} x" for speed, rate in off.items())
            progress(f"  answers in time per second: {rates}; with flow control {on:.2f}")
        name = f"{slo.text}: answers in time at {_BEYOND:g} x, over the most at any load without"
        figures.append(at_least(name, ratios, "ratio", 0.5))
    return figures


def _in_time(
    slo: Slo, trace: Path | None, speed: float, seed: int, flow: FlowControl | None
) -> float:
    """Answers per second that meet `slo`, of conversations `speed` times as fast."""
    requests = Conversations(trace, speed, limit=_CONVERSATIONS).requests(seed)
    pods = engines(10, seed=seed)
    router = RealPicker(pods, seed)
    router.meet(StatedSlo(slo.ttft, slo.itl))
    simulation = Simulation(pods, router, gate=FlowGate(router, flow))
    served = simulation.run(requests).served
    return sum(each.meets(slo) for each in served) / (requests[-1].at - requests[0].at)


def _flow(fairness: str) -> FlowControl:
    settings = {"enabled": True, "ttl": PATIENT, "fairness": fairness}
    return FlowControl(**settings)  # type: ignore[arg-type]


def _run(loads: Sequence[Load], flow: FlowControl | None, seed: int, seconds: float) -> FlowGate:
    return run(engines(4, seed=seed), loads, flow, seconds=seconds, output=OUTPUT, seed=seed)


def _ttft(gate: FlowGate, seconds: float) -> float:
    """p99 TTFT of the important requests."""
    served = served_within(gate, _WARM, seconds, lambda sender: sender == HIGH)
    return percentile((each.ttft for each in served), 99)


def _ttft_mean(gate: FlowGate) -> float:
    return fmean(served.ttft for served in gate.served)


def _tokens(gate: FlowGate, seconds: float) -> int:
    """Tokens of the requests that ended while all pods were loaded."""
    ended = (s.work for s in gate.served if s.ended and _WARM <= s.ended < seconds)
    return sum(work.prompt_tokens + work.output_tokens for work in ended)


def _look_seconds() -> list[float]:
    """Microseconds to find out that a pod has room, of several rounds."""
    fleet = Fleet()
    fleet.apply(
        DiscoveredBackend(Backend(name=str(i), url=f"http://10.0.0.{i + 1}:8000"))
        for i in range(_PODS)
    )
    flows = Flows[Held](fleet, lambda *_: None, Random(0))
    flows.settings, rounds, times = flow_settings(ON), 1000, []
    for _ in range(10):
        began = process_time()
        for _ in range(rounds):
            flows.must_wait(None, 1000, 1.0)
        times.append((process_time() - began) / rounds * 1e6)
    return times


if __name__ == "__main__":
    main()
