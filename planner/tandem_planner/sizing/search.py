"""The cheapest deployment that meets objectives, or the one that serves most with given GPUs.

The capacity of a single pod of each kind is the highest rate at which it meets its part of the
objectives: prefill pods TTFT, decode pods ITL, co-located ones both (Zhong and others, *DistServe*,
OSDI 2024, search each phase like this). From it follow the numbers of pods of each kind, which are
then simulated together, and changed one by one until no pod can be spared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf, sqrt
from typing import Final

from tandem_planner.fabrics import Fabric
from tandem_planner.simulation.engine import Batching
from tandem_planner.simulation.measures import Slo
from tandem_planner.simulation.work import Request

from .deployments import CannotServe, Deployment, Estimate, Pool, Served
from .memory import LARGEST_TENSOR
from .roofline import BEST, WORST

COLOCATED_BUDGETS: Final = (512, 2048, 8192)
"""Tokens per step of co-located pods: small chunks spare ITL, large ones TTFT."""
PREFILL: Final = Batching(8192, 256)
"""Of prefill pods: large steps, which keep a GPU busier."""
DECODE: Final = Batching(2048, 512)
"""Of decode pods: they compute one token of each prompt."""
_SCREENED: Final = 800
"""Requests that are enough to compare single pods."""
_GROWTH: Final = 0.05
"""Largest growth of TTFT, in seconds per second, of pods that keep up: without a limit of TTFT, an
overloaded pool would meet any objective."""
_BUSY: Final = 0.9
"""Share of the time from which on prefill pods are what does not keep up."""
_WITHIN_NODE: Final = (Fabric.NVLINK, Fabric.PCIE, Fabric.SHARED_MEMORY)
"""Fabrics over which a prefill and a decode pod share a node."""
_HALVINGS: Final = 6
"""Of the interval in which a capacity lies."""
_FEW_HALVINGS: Final = 4
"""Of one that is half and a third around the sum of the pods' capacities."""
_FINALISTS: Final = 4
"""Kinds of deployments, split and co-located each, that are simulated as a whole."""
_HOPELESS: Final = 1.35
"""Kinds of which the capacities of single pods ask for so many times the GPUs of one that was
simulated, or promise so much less of its rate, are not: pods together do better than alone, but not
by as much."""
_CHANGES: Final = 12
"""Most changes of the number of pods."""


@dataclass(frozen=True)
class Workload:
    """Requests at a rate of one per second on average, in order of time."""

    requests: Sequence[Request]
    seconds: float = 60.0
    """Least time of a simulation: queues of an overloaded pool have grown by then."""
    least: int = 1000
    """Least requests of a simulation: ten miss what 1 % misses."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(r.prompt_tokens + r.output_tokens for r in self.requests)

    @cached_property
    def mean_prompt(self) -> float:
        """Tokens."""
        return sum(r.prompt_tokens for r in self.requests) / len(self.requests)

    @cached_property
    def mean_output(self) -> float:
        """Tokens."""
        return sum(r.output_tokens for r in self.requests) / len(self.requests)

    @cached_property
    def is_shared(self) -> bool:
        """Whether prompts have prefixes in common."""
        return any(request.blocks for request in self.requests)

    def at(self, rate: float, most: int | None = None) -> list[Request]:
        """The requests of a simulation at `rate` per second, at most `most` of them."""
        count = ceil(max(self.least, self.seconds * rate))
        count = count if most is None else min(count, most)
        return [request._replace(at=request.at / rate) for request in self.requests[:count]]


@dataclass(frozen=True)
class Target:
    """What a deployment must do."""

    slo: Slo
    attainment: float = 0.9
    """Share of the requests that must meet the SLO."""


@dataclass(frozen=True)
class Plan:
    """A deployment, what it serves, and what becomes of it with a pod less."""

    deployment: Deployment
    rate: float
    """Requests per second."""
    served: Served
    without_prefill: Served | None = None
    """With one prefill pod less; None: there is one, or none."""
    without_decode: Served | None = None
    """With one decode pod less."""


@dataclass(frozen=True)
class Bounds:
    """A plan where engines reach as much of the peaks as is assumed at most, and at least."""

    best: Served
    worst: Served
    """The same pods at the same rate."""
    fewest: int
    most: int | None
    """GPUs with which pods of the same kinds meet the objective; None: no number does."""


class Search:
    """Deployments of one model on one kind of GPU, for one workload."""

    def __init__(
        self,
        estimate: Estimate,
        workload: Workload,
        objective: Target,
        *,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`progress` gets a line for each kind of deployment."""
        self.estimate, self.workload, self.objective = estimate, workload, objective
        self._progress = progress
        self._capacities: dict[tuple[int, Batching, str], float] = {}

    def cheapest(self, rate: float) -> list[Plan]:
        """A plan of each kind that meets the objective at `rate`, the fewest GPUs first. Raises
        CannotServe."""
        estimated = [(self._count(kind, rate), kind) for kind in self._kinds()]
        finalists = sorted(((d.gpus, i, d) for i, (d, _) in enumerate(estimated) if d), key=_order)
        plans: list[Plan] = []
        for alike in _each_architecture(finalists):
            fewest = inf
            for gpus, _, deployment in alike:
                self._progress(f"{deployment.text}: {gpus:.0f} GPUs")
                if gpus <= _HOPELESS * fewest and (plan := self.shrunk(deployment, rate)):
                    fewest = min(fewest, plan.deployment.gpus)
                    plans.append(plan)
        return sorted(plans, key=_worth)

    def most(self, gpus: int) -> list[Plan]:
        """A plan of each kind with at most `gpus`, the one that serves most first. Raises
        CannotServe."""
        estimated = [(self._fill(kind, gpus), kind) for kind in self._kinds()]
        finalists = sorted(
            ((-rate, i, d) for i, ((rate, d), _) in enumerate(estimated) if d is not None),
            key=_order,
        )
        if not finalists:
            raise CannotServe(f"{gpus} GPUs are fewer than one pod of each role needs")
        plans = []
        for alike in _each_architecture(finalists):
            most = 0.0
            for negative, _, deployment in alike:
                self._progress(f"{deployment.text}: {deployment.gpus} GPUs")
                if -negative * _HOPELESS >= most:
                    best = self.highest(deployment, -negative / 2, -negative * _HOPELESS)
                    most = max(most, best)
                    if best:
                        plans.append(Plan(deployment, best, self.serve(deployment, best)))
        return sorted(plans, key=lambda plan: (-plan.rate, plan.deployment.gpus))

    def serve(self, deployment: Deployment, rate: float) -> Served:
        """Simulate the workload."""
        return self.estimate.serve(deployment, self.workload.at(rate), self.objective.slo)

    def shrunk(self, deployment: Deployment, rate: float) -> Plan | None:
        """The plan with the fewest pods of these kinds; None: too many would be needed."""
        served = self.serve(deployment, rate)
        for _ in range(_CHANGES):
            if self._is_met(served):
                break
            deployment = self._grown(deployment, served)
            served = self.serve(deployment, rate)
        else:
            return None
        return self._without_spares(Plan(deployment, rate, served))

    def _without_spares(self, plan: Plan) -> Plan:
        """`plan` without the pods that can be spared."""
        for _ in range(_CHANGES):
            deployment = plan.deployment
            prefills = deployment.prefill.replicas if deployment.prefill else 0
            decodes = deployment.decode.replicas
            fewer = []
            if prefills > 1:
                fewer.append(deployment.resized(prefills - 1, decodes))
            if decodes > 1:
                fewer.append(deployment.resized(prefills, decodes - 1))
            served = [self.serve(each, plan.rate) for each in fewer]
            met = [
                (d.gpus, -s.measures.attainment, i)
                for i, (d, s) in enumerate(zip(fewer, served, strict=True))
                if self._is_met(s)
            ]
            if not met:
                neighbours = iter(served)
                return replace(
                    plan,
                    without_prefill=next(neighbours) if prefills > 1 else None,
                    without_decode=next(neighbours) if decodes > 1 else None,
                )
            best = min(met)[2]
            plan = Plan(fewer[best], plan.rate, served[best])
        return plan

    def _grown(self, deployment: Deployment, served: Served) -> Deployment:
        """`deployment` with a pod, or a tenth, more of the role that misses more."""
        decodes = deployment.decode.replicas
        if deployment.prefill is None:
            return deployment.resized(0, decodes + 1 + decodes // 10)
        prefills, measures = deployment.prefill.replicas, served.measures
        is_decode = measures.slow > measures.late_first or (
            measures.slow == measures.late_first and served.prefill_busy < _BUSY
        )
        # Without room in the decode pods' KV, first tokens are late.
        if is_decode or (served.preemptions and served.prefill_busy < 0.7):
            return deployment.resized(prefills, decodes + 1 + decodes // 10)
        return deployment.resized(prefills + 1 + prefills // 10, decodes)

    def _is_met(self, served: Served) -> bool:
        measures = served.measures
        is_stable = measures.growth <= _GROWTH
        return is_stable and measures.attainment >= self.objective.attainment

    def _kinds(self) -> Iterator[Deployment]:
        """One pod of each role, for all tensor sizes and sizes of a step."""
        longest = self.workload.longest
        for budget in COLOCATED_BUDGETS:
            batching = Batching(budget, 256)
            for tensor in self.estimate.tensor_sizes(batching, longest):
                yield Deployment(Pool(1, tensor, batching))
        is_near = self.estimate.fabric in _WITHIN_NODE
        for prefill in self.estimate.tensor_sizes(PREFILL, longest):
            for decode in self.estimate.tensor_sizes(DECODE, longest):
                if is_near and prefill + decode > LARGEST_TENSOR:
                    continue
                yield Deployment(Pool(1, decode, DECODE), Pool(1, prefill, PREFILL))

    def _count(self, kind: Deployment, rate: float) -> Deployment | None:
        """As many pods as their capacities say; None: a pod cannot meet the objective at all."""
        prefill, decode = self.capacities(kind)
        if not prefill or not decode:
            return None
        prefills = 0 if kind.prefill is None else ceil(rate / prefill)
        return kind.resized(prefills, ceil(rate / decode))

    def _fill(self, kind: Deployment, gpus: int) -> tuple[float, Deployment | None]:
        """The numbers of pods within `gpus` that serve most, and the rate by capacities."""
        prefill, decode = self.capacities(kind)
        if kind.prefill is None:
            decodes = gpus // kind.decode.tensor
            return decodes * decode, kind.resized(0, decodes) if decodes and decode else None
        best: tuple[float, Deployment | None] = (0.0, None)
        for prefills in range(1, gpus // kind.prefill.tensor + 1):
            decodes = (gpus - prefills * kind.prefill.tensor) // kind.decode.tensor
            rate = min(prefills * prefill, decodes * decode)
            if rate > best[0]:
                best = rate, kind.resized(prefills, decodes)
        return best

    def capacities(self, kind: Deployment) -> tuple[float, float]:
        """Requests per second of one pod of each role; 0: it cannot meet the objective."""
        if kind.prefill is None:
            capacity = self._capacity(kind.decode, "both")
            return capacity, capacity
        return self._capacity(kind.prefill, "prefill"), self._capacity(kind.decode, "decode")

    def _capacity(self, pool: Pool, role: str) -> float:
        key = pool.tensor, pool.batching, role
        if key not in self._capacities:
            self._progress(f"{role}: {pool.tensor} GPUs, {pool.batching.budget} tokens per step")
            self._capacities[key] = self._pod_capacity(pool, role)
        return self._capacities[key]

    def _pod_capacity(self, pool: Pool, role: str) -> float:
        slo, estimate, workload = self.objective.slo, self.estimate, self.workload
        answering = workload.mean_output / self._token_rate(pool)
        computing = workload.mean_prompt * self._prompt_token_seconds(pool)
        if role == "prefill":
            # Caches may spare most of the prompts.
            most = 1.2 / computing * (8 if workload.is_shared else 1)
        else:
            most = 1.2 / (
                answering if role == "decode" or workload.is_shared else max(answering, computing)
            )

        def serve(rate: float) -> Served:
            requests = workload.at(rate, _SCREENED)
            if role == "decode":
                return estimate.answer(pool, requests, slo)
            if role == "prefill":
                requests = [request._replace(output_tokens=1) for request in requests]
                return estimate.serve(Deployment(pool), requests, Slo(ttft=slo.ttft))
            return estimate.serve(Deployment(pool), requests, slo)

        return self._highest(serve, most / 50, most)

    def _token_rate(self, pool: Pool) -> float:
        """Tokens per second that a pod answers with, as many at once as its memory has room for."""
        context = self.workload.mean_prompt + self.workload.mean_output / 2
        room = self.estimate.memory(pool.tensor, pool.batching).tokens / context
        decodes = max(1.0, min(room, pool.batching.requests))
        return decodes / self.estimate.step(pool.tensor).seconds(decodes, decodes * context)

    def _prompt_token_seconds(self, pool: Pool) -> float:
        """Of each token, in a step full of prompts."""
        budget = pool.batching.budget
        looks = budget * self.workload.mean_prompt
        return self.estimate.step(pool.tensor).seconds(0, 0, budget, looks) / budget

    def bounds(self, plan: Plan) -> Bounds:
        """What becomes of `plan` where the assumptions do not hold."""
        best, worst = (
            Search(self.estimate.assuming(efficiency), self.workload, self.objective)
            for efficiency in (BEST, WORST)
        )
        fewest, most = (search.resized(plan.deployment, plan.rate) for search in (best, worst))
        return Bounds(
            best=best.serve(plan.deployment, plan.rate),
            worst=worst.serve(plan.deployment, plan.rate),
            fewest=fewest.deployment.gpus if fewest else plan.deployment.gpus,
            most=most.deployment.gpus if most else None,
        )

    def resized(self, kind: Deployment, rate: float) -> Plan | None:
        """The plan with the fewest pods of the kinds of `kind`; None: no number is enough."""
        deployment = self._count(kind, rate)
        return self.shrunk(deployment, rate) if deployment else None

    def highest(
        self, deployment: Deployment, low: float, high: float, halvings: int = _FEW_HALVINGS
    ) -> float:
        """The highest rate from `low` to `high` at which it meets the objective; 0: none."""
        return self._highest(lambda rate: self.serve(deployment, rate), low, high, halvings)

    def impossible(self) -> str | None:
        """Why no deployment can meet the objective, however little it has to do; None: it may."""
        slo, workload = self.objective.slo, self.workload
        sizes = self.estimate.tensor_sizes(DECODE, workload.longest)
        steps = {t: self.estimate.step(t).seconds(1, workload.mean_prompt) for t in sizes}
        tensor = min(steps, key=steps.__getitem__)
        where = f"on {tensor} × {self.estimate.gpu.title}"
        if slo.itl is not None and slo.itl < steps[tensor]:
            return f"itl is below one decode step, {1e3 * steps[tensor]:.3g} ms {where} at best"
        tokens = self._prompt_quantile(self.objective.attainment)
        prompts = {t: self.estimate.prompt_seconds(Pool(1, t, PREFILL), tokens) for t in sizes}
        tensor = min(prompts, key=prompts.__getitem__)
        where = f"on {tensor} × {self.estimate.gpu.title}"
        if slo.ttft is not None and slo.ttft < prompts[tensor] and not workload.is_shared:
            return (
                f"ttft is below the prefill of {tokens:,} tokens, {prompts[tensor]:.3g} s {where} "
                f"at best: {1 - self.objective.attainment:.0%} of the prompts are longer"
            )
        return None

    def _prompt_quantile(self, share: float) -> int:
        lengths = sorted(request.prompt_tokens for request in self.workload.requests)
        return lengths[min(len(lengths) - 1, int(share * len(lengths)))]

    def _highest(
        self,
        serve: Callable[[float], Served],
        low: float,
        high: float,
        halvings: int = _HALVINGS,
    ) -> float:
        """The highest rate from `low` to `high` that meets the objective; 0: `low` does not."""
        if self._is_met(serve(high)):
            return high
        if not self._is_met(serve(low)):
            return 0.0
        for _ in range(halvings):
            middle = sqrt(low * high)
            low, high = (middle, high) if self._is_met(serve(middle)) else (low, middle)
        return low


def _order(candidate: tuple[float, int, Deployment]) -> tuple[float, int]:
    return candidate[0], candidate[1]


def _each_architecture(
    ranked: Sequence[tuple[float, int, Deployment]],
) -> Iterator[Sequence[tuple[float, int, Deployment]]]:
    """The best of `ranked`: co-located deployments, then split ones."""
    for is_split in (False, True):
        alike = [each for each in ranked if (each[2].prefill is not None) == is_split]
        yield alike[:_FINALISTS]


def _worth(plan: Plan) -> tuple[int, bool, float]:
    """Fewest GPUs first, then the simpler, then the better one."""
    deployment = plan.deployment
    return deployment.gpus, deployment.prefill is not None, -plan.served.measures.attainment
