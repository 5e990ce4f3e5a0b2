"""How long the choice of pods takes at 100 pods, without parsing the body and hashing the prompt.

    python -m benchmarks.decision [--rounds 5] [--json FILE]

The pods have requests in flight, prompts in the prefix index, and gauges that change between two
requests, as under load. What is measured is `Scheduler.schedule`, which also looks the prompt up in
the index, with 100 unified pods and with 50 prefill and 50 decode pods: first nothing is known of
where they run, then each of 50 nodes in 5 fabric domains has one of both, and transfers take as
long as they do within a node, within a domain and beyond. The last row adds a gateway's subset
hint of 90 of these pods, the same one with each request. Rows with an objective have requests that
are to meet a TTFT and an ITL.
"""

import gc
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import click

from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.routing import Routing
from tandem_epp.choice.scheduler import Scheduler
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.estimates.request_load import RequestLoad
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.request.inference import InferenceRequest
from tandem_planner.fabrics import FABRICS, Fabric
from tandem_planner.objective import NO_OBJECTIVE, Objective, make_objective

from .figures import Figure, at_most, progress, report, without_target

PODS = 100
_REQUESTS = 2000
_PROMPT_BYTES = 16_000
_SHARED_BYTES = 12_000


_RATES = {
    FabricClass.SAME_NODE: Fabric.NVLINK,
    FabricClass.SAME_DOMAIN: Fabric.RDMA,
    FabricClass.ELSEWHERE: Fabric.TCP,
}
_PODS_PER_NODE, _PODS_PER_DOMAIN = 2, 20


def _fleet(roles: Sequence[Role], *, has_nodes: bool) -> Fleet:
    fleet = Fleet()
    fleet.apply(
        DiscoveredBackend(
            Backend(
                name=f"pod-{i}",
                url=f"http://10.0.0.{i + 1}:8000",
                role=role,
                models=("m",),
                node=f"node-{i // _PODS_PER_NODE}" if has_nodes else None,
                domain=f"rack-{i // _PODS_PER_DOMAIN}" if has_nodes else None,
            )
        )
        for i, role in enumerate(roles)
    )
    for pod in fleet if has_nodes else ():
        for fabric, name in _RATES.items():
            pod.estimates.add_transfers((1, 1e9, 1e9 / FABRICS[name].assumed), 0.0, fabric)
        pod.estimates.learned()
    return fleet


def _requests(random: Random) -> list[InferenceRequest]:
    """Prompts of about 4,000 tokens, of which 3,000 are one of 20 common beginnings."""
    made = []
    for _ in range(_REQUESTS):
        shared = b"%d " % random.randrange(20) * _SHARED_BYTES
        prompt = shared[:_SHARED_BYTES] + random.randbytes(_PROMPT_BYTES - _SHARED_BYTES)
        request = InferenceRequest("m", prompt, is_stream=True, max_tokens=200)
        # Hashed now: the benchmark leaves it out.
        request.chain  # noqa: B018
        made.append(request)
    return made


class Seconds(NamedTuple):
    """Seconds of a decision."""

    median: float
    """By the clock."""
    cpu: float
    """Mean CPU time: other processes lengthen it less, and refits and full tables count."""


def _decision_seconds(
    roles: Sequence[Role],
    seed: int,
    *,
    has_nodes: bool,
    hinted: int | None = None,
    objective: Objective = NO_OBJECTIVE,
) -> Seconds:
    """`hinted`: how many of the pods the gateway's hint allows; None: there is none. `objective`:
    of all requests."""
    random, now = Random(seed), 1000.0
    fleet = _fleet(roles, has_nodes=has_nodes)
    fleet.objectives = {"m": objective}
    pods = list(fleet)
    addresses = [pod.address for pod in pods[:hinted] if pod.address is not None]
    subset = None if hinted is None else frozenset(addresses)
    serving = DisaggregatedServing(enabled=Role.PREFILL in roles)
    scheduling = load_scheduling(parse_documents("{}", "router.yaml")[0], {}, serving)
    scheduler = Scheduler(fleet, Routing(serving, scheduling), random)
    open_requests: list[RequestLoad] = []
    durations, cpu = [], 0.0
    for request in _requests(random):
        now += 0.01
        # One page arrives between two requests.
        gauges = Gauges(running=float(random.randrange(20)), kv_usage=random.random() / 2)
        random.choice(pods).apply_scrape(ScrapeResult(gauges, b"1", 16, 60_000), now)
        fleet.invalidate_scores()
        fleet.figures.share()
        context = ChoiceContext(request, fleet.prefixes)
        cpu_before, began = process_time(), perf_counter()
        result = scheduler.schedule(context, "m", subset, now)
        durations.append(perf_counter() - began)
        cpu += process_time() - cpu_before
        prefill = result.prefill[0].estimates if result.prefill else None
        decode = result.decode[0].estimates
        open_requests.append(RequestLoad(decode, prefill, result.size, now, objective=objective))
        fleet.prefixes.confirm(fleet.prefixes.place(result.decode[0], request.chain))
        if len(open_requests) > 5 * PODS:
            open_requests.pop(0).end(now)
        elif len(open_requests) > PODS:
            open_requests[-PODS].on_response(now)
    return Seconds(median(durations), cpu / len(durations))


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(rounds: int, file: Path | None) -> None:
    """Measure decisions."""
    figures: list[Figure] = []
    gc.freeze()
    disaggregated = [Role.PREFILL, Role.DECODE] * (PODS // 2)
    objective = make_objective(2.0, 0.05, 0.9)
    for name, roles, has_nodes, hinted, asked in (
        ("unified", [Role.UNIFIED] * PODS, False, None, NO_OBJECTIVE),
        ("unified, with an objective", [Role.UNIFIED] * PODS, False, None, objective),
        ("50 prefill, 50 decode", disaggregated, False, None, NO_OBJECTIVE),
        ("50 prefill, 50 decode, with an objective", disaggregated, False, None, objective),
        ("50 prefill, 50 decode on 50 nodes", disaggregated, True, None, NO_OBJECTIVE),
        ("the same, 90 of them in a repeated hint", disaggregated, True, 90, NO_OBJECTIVE),
    ):
        progress(f"{PODS} pods: {name}, {rounds} rounds")
        seconds = [
            _decision_seconds(roles, seed, has_nodes=has_nodes, hinted=hinted, objective=asked)
            for seed in range(rounds)
        ]
        micros = [1e6 * each.median for each in seconds]
        figures.append(at_most(f"decision at {PODS} pods, {name}", micros, "µs", 150))
        micros = [1e6 * each.cpu for each in seconds]
        figures.append(without_target(f"  its CPU time, on average, {name}", micros, "µs"))
    report(figures, file)


if __name__ == "__main__":
    main()
