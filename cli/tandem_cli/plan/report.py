"""The answer of `tandem plan`, as values: `--json` writes exactly these.

Times are seconds, sizes bytes, rates per second. Each figure has the bounds between which it lies
if engines reach as much of the hardware's peaks as is assumed at best, and at worst.
"""

from collections.abc import Sequence
from dataclasses import asdict
from math import ceil

import msgspec

from tandem_planner.fabrics import Fabric, least_rate, verdict
from tandem_planner.sizing.deployments import Estimate, Pool, Served
from tandem_planner.sizing.roofline import ASSUMED
from tandem_planner.sizing.search import DECODE, PREFILL, Bounds, Plan, Target, Workload

FIGURES = (
    "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "gap_p99", "e2e_p50", "e2e_p99", "attainment",
)  # fmt: skip
"""Fields of `Measures` that an option has."""


class Figure(msgspec.Struct, frozen=True):
    """A number and its bounds; None: unknown."""

    value: float
    low: float
    high: float | None


class PoolAnswer(msgspec.Struct, frozen=True):
    """Alike pods."""

    replicas: int
    tensor: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_tokens: int
    """That fit into one pod."""
    busy: float
    """Share of the time that the pods compute."""

    @property
    def text(self) -> str:
        """Such as `2 × TP 4`."""
        return f"{self.replicas} × TP {self.tensor}"


class Option(msgspec.Struct, frozen=True):
    """A deployment."""

    architecture: str
    """`split` or `co-located`."""
    gpus: Figure
    """That meet the objectives, with pods of these kinds."""
    rate: float
    """Requests per second."""
    prefill: PoolAnswer | None
    decode: PoolAnswer
    figures: dict[str, Figure]
    """By the names of `FIGURES`."""
    hits: float
    """Share of the prompt tokens that were in a cache."""
    preemptions: int


class Network(msgspec.Struct, frozen=True):
    """What a hand-off of a prompt of mean length takes."""

    prompt_tokens: int
    kv_bytes: float
    prefill: float
    """Seconds of the prefill."""
    transfer: float
    """Seconds of the transfer over the fabric."""
    verdict: str
    least_rate: float
    """Bytes per second between a prefill pod and a decode pod below which a transfer takes more
    than half of the prefill."""


class Answer(msgspec.Struct, frozen=True):
    """All of it."""

    model: str
    gpu: str
    fabric: str
    rate: float | None
    budget: int | None
    """GPUs, where they were given instead of a rate."""
    requests: dict[str, float]
    """Mean tokens of `prompt` and `output`, and tokens of the `longest` request."""
    slo: dict[str, float | None]
    is_calibrated: bool
    options: list[Option]
    """The best one first, then the runner-up, then the best of the other architecture."""
    binding: str
    """What keeps the best one from being smaller, or from serving more."""
    network: Network


def shown(plans: Sequence[Plan]) -> list[Plan]:
    """The best of `plans`, the runner-up with pods of other kinds, and the best of the other
    architecture."""
    kinds: dict[object, Plan] = {}
    for plan in plans:
        prefill, decode = plan.deployment.prefill, plan.deployment.decode
        kinds.setdefault((prefill.tensor if prefill else None, decode.tensor), plan)
    best, *others = kinds.values()
    is_split = best.deployment.prefill is not None
    different = [plan for plan in others if (plan.deployment.prefill is not None) != is_split]
    return list({id(plan): plan for plan in [best, *others[:1], *different[:1]]}.values())


def option(estimate: Estimate, plan: Plan, bounds: Bounds) -> Option:
    """`plan` with its bounds."""
    deployment, served = plan.deployment, plan.served
    prefill = deployment.prefill
    return Option(
        architecture="split" if prefill else "co-located",
        gpus=Figure(deployment.gpus, min(bounds.fewest, deployment.gpus), bounds.most),
        rate=plan.rate,
        prefill=_pool(estimate, prefill, served.prefill_busy) if prefill else None,
        decode=_pool(estimate, deployment.decode, served.decode_busy),
        figures={name: _figure(name, served, bounds) for name in FIGURES},
        hits=served.measures.hits,
        preemptions=served.preemptions,
    )


def _pool(estimate: Estimate, pool: Pool, busy: float) -> PoolAnswer:
    tokens = estimate.memory(pool.tensor, pool.batching).tokens
    return PoolAnswer(
        pool.replicas, pool.tensor, pool.batching.budget, pool.batching.requests, tokens, busy
    )


def _figure(name: str, served: Served, bounds: Bounds) -> Figure:
    values = [getattr(s.measures, name) for s in (served, bounds.best, bounds.worst)]
    return Figure(values[0], min(values), max(values))


def network(estimate: Estimate, workload: Workload, plans: Sequence[Plan]) -> Network:
    """Of the best deployment with separate pools, else of pods of the smallest size that fits."""
    split = next((p.deployment for p in plans if p.deployment.prefill), None)
    smallest = estimate.tensor_sizes(PREFILL, workload.longest)[0]
    prefill = split.prefill if split and split.prefill else Pool(1, smallest, PREFILL)
    decode = split.decode if split else Pool(1, smallest, DECODE)
    tokens = max(1, round(workload.mean_prompt))
    size = estimate.kv_size(decode.tensor).bytes(tokens)
    seconds = estimate.prompt_seconds(prefill, tokens)
    transfer = estimate.transfer(prefill.tensor, decode.tensor).seconds(size)
    name = str(verdict(transfer, seconds))
    return Network(tokens, size, seconds, transfer, name, least_rate(size, seconds))


def binding(plan: Plan, objective: Target) -> str:
    """What keeps a plan from being smaller, in a sentence."""
    deployment, prefill = plan.deployment, plan.deployment.prefill
    roles = [("decode" if prefill else "co-located", deployment.decode, plan.without_decode)]
    if prefill:
        roles.append(("prefill", prefill, plan.without_prefill))
    role, pool, without = max(roles, key=lambda each: each[1].gpus)
    if pool.replicas == 1:
        return f"The model's size: one {role} pod of {pool.tensor} GPUs is needed for any load."
    if without is None:
        return _binding_at_capacity(plan, objective)
    if without.measures.attainment >= objective.attainment:
        fewer = f"{pool.replicas - 1} instead of {pool.replicas}"
        return f"{role.capitalize()} pods: {fewer} do not keep up."
    missed, kept = 1.0 - without.measures.attainment, 1.0 - plan.served.measures.attainment
    return (
        f"{role.capitalize()} pods: with {pool.replicas - 1} instead of {pool.replicas}, "
        f"{missed:.0%} of the requests miss their {_limit(without)} instead of {kept:.0%}."
    )


def _binding_at_capacity(plan: Plan, objective: Target) -> str:
    limit, percent = _limit(plan.served), f"{1.0 - objective.attainment:.0%}"
    return f"At a higher rate more than {percent} of the requests miss their {limit}."


def _limit(served: Served) -> str:
    measures = served.measures
    missed = {"ttft": measures.late_first, "itl": measures.slow, "e2e": measures.late_last}
    limit = max(missed, key=missed.__getitem__)
    return f"{limit}, because the pods' KV has no room" if served.preemptions else limit


def answer(
    *,
    model: str,
    gpu: str,
    fabric: Fabric,
    rate: float | None,
    budget: int | None,
    estimate: Estimate,
    workload: Workload,
    objective: Target,
    plans: Sequence[Plan],
    options: list[Option],
) -> Answer:
    """The whole answer; `plans` has at least one."""
    slo = asdict(objective.slo) | {"attainment": objective.attainment}
    return Answer(
        model=model,
        gpu=gpu,
        fabric=str(fabric),
        rate=rate,
        budget=budget,
        requests={
            "prompt": workload.mean_prompt,
            "output": workload.mean_output,
            "longest": ceil(workload.longest),
        },
        slo=slo,
        is_calibrated=estimate.measured is not None or estimate.efficiency != ASSUMED,
        options=options,
        binding=binding(plans[0], objective),
        network=network(estimate, workload, plans),
    )
