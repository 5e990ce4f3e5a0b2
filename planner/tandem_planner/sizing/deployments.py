"""Deployments of a model, and pods of them to simulate: what is known of a model on a GPU.

Errors:

    CannotServe (a ValueError)     the message says what does not fit, with bytes, or is missing
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tandem_planner.fabrics import FABRICS, Fabric
from tandem_planner.kv_size import KvSize, rank_kv_size
from tandem_planner.simulation.engine import Batching, Engine
from tandem_planner.simulation.link import Link
from tandem_planner.simulation.loop import AT_ONCE, simulate
from tandem_planner.simulation.measures import Measures, Slo, measure
from tandem_planner.simulation.routers import LeastWork, Pools
from tandem_planner.simulation.work import Request
from tandem_planner.step_cost import LinearStep, StepCost, prompt_seconds
from tandem_planner.transfer import TRANSFER_PRIOR, TransferCost

from .gpus import Gpu
from .memory import Memory, memory, tensor_sizes
from .model_shape import ModelShape
from .roofline import ASSUMED, BEST, WORST, Efficiency, RooflineStep

WARM_UP: Final = 0.2
"""Share of the requests, the first ones, that are not measured: pods start empty."""
_FABRIC_FACTORS: Final[Mapping[Efficiency, float]] = {ASSUMED: 1.0, BEST: 1.25, WORST: 0.5}
"""Of a fabric's assumed rate, for each assumption about the GPU."""


class CannotServe(ValueError):
    """No deployment of this kind can be; the message is one line for the user."""


class Pool(NamedTuple):
    """Alike pods."""

    replicas: int
    tensor: int
    """GPUs of each pod."""
    batching: Batching

    @property
    def gpus(self) -> int:
        """Of all pods."""
        return self.replicas * self.tensor


@dataclass(frozen=True, slots=True)
class Deployment:
    """Pods that serve a model."""

    decode: Pool
    """The pods that answer; without `prefill`, they compute prompts too."""
    prefill: Pool | None = None

    @property
    def gpus(self) -> int:
        """Of all pods."""
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)

    @property
    def text(self) -> str:
        """Such as `2 × TP 8 + 4 × TP 2`."""
        pools = [self.prefill, self.decode] if self.prefill else [self.decode]
        return " + ".join(f"{pool.replicas} × TP {pool.tensor}" for pool in pools)

    def resized(self, prefills: int, decodes: int) -> "Deployment":
        """The same pods in other numbers; 0 prefill pods where there are none."""
        return Deployment(
            self.decode._replace(replicas=decodes),
            self.prefill._replace(replicas=prefills) if self.prefill else None,
        )


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a workload on a deployment."""

    measures: Measures
    prefill_busy: float
    """Share of the time that the prefill pods compute; 0 without."""
    decode_busy: float
    link_busy: float
    """Share of the time that a decode pod receives KV."""
    preemptions: int
    """Requests that lost their KV because there was no room, and were computed again."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known, or assumed, of a model on one kind of GPU."""

    model: ModelShape
    gpu: Gpu
    fabric: Fabric
    """Between prefill and decode pods."""
    efficiency: Efficiency = ASSUMED
    cache_dtype: str = "auto"
    utilization: float = 0.9
    """Share of a GPU's memory that an engine takes."""
    weights: float | None = None
    """Bytes of the model's files; None: by its shape."""
    streamed: float = 0.0
    """Share of the KV that moves while its prompt is computed."""
    measured: LinearStep | None = None
    """Of `measured_tensor` GPUs, instead of a roofline."""
    measured_tensor: int = 1
    measured_error: float = 0.0
    """By how much, as a share, what was measured may differ from the truth."""
    request: float = 0.0
    """Seconds of a request beside its steps."""

    def assuming(self, efficiency: Efficiency) -> "Estimate":
        """The same with another assumption about what an engine reaches."""
        return replace(self, efficiency=efficiency)

    def step(self, tensor: int) -> StepCost:
        """Seconds of steps on `tensor` GPUs."""
        if self.measured is not None:
            factor = 1.0 + self.measured_error
            return self.measured.times({BEST: factor, WORST: 1 / factor}.get(self.efficiency, 1.0))
        return RooflineStep(
            self.model, self.gpu, tensor,
            cache_dtype=self.cache_dtype, efficiency=self.efficiency,
        )  # fmt: skip

    def memory(self, tensor: int, batching: Batching) -> Memory:
        """What a GPU of `tensor` holds."""
        return memory(
            self.model,
            self.gpu,
            tensor,
            cache_dtype=self.cache_dtype,
            utilization=self.utilization,
            budget=batching.budget,
            requests=batching.requests,
            weights=self.weights,
        )

    def tensor_sizes(self, batching: Batching, longest: int) -> list[int]:
        """Those with which a pod has room for a request of `longest` tokens. Raises CannotServe."""
        sizes = [self.measured_tensor] if self.measured else tensor_sizes(self.model)
        if not sizes:
            raise CannotServe(
                f"{self.model.heads} attention heads and {self.model.kv.kv_heads} KV heads cannot "
                "be divided among the GPUs of a node"
            )
        fitting = [t for t in sizes if self.memory(t, batching).tokens > longest + longest // 50]
        if not fitting:
            raise CannotServe(self._too_large(sizes[-1], batching, longest))
        return fitting

    def _too_large(self, tensor: int, batching: Batching, longest: int) -> str:
        needed = self.memory(tensor, batching)
        room = longest * needed.per_token
        return (
            f"does not fit: {tensor} × {self.gpu.title} have {_giga(needed.usable)} each "
            f"({self.utilization:.0%} of {_giga(self.gpu.memory)}), and need "
            f"{_giga(needed.weights)} for weights, {_giga(needed.activations)} for activations, "
            f"{_giga(needed.runtime)} for the runtime and {_giga(room)} for the KV of the longest "
            f"request, {longest:,} tokens"
        )

    def kv_size(self, tensor: int) -> KvSize:
        """Bytes of a prompt's KV that a pod of `tensor` GPUs reads, copies of heads included."""
        return KvSize(*(
            None if part is None else part * tensor
            for part in rank_kv_size(self.model.kv, tensor, self.cache_dtype)
        ))  # type: ignore[arg-type]  # fmt: skip

    def transfer(self, prefill: int, decode: int) -> TransferCost:
        """Of a prompt's KV between pods of so many GPUs. Raises CannotServe."""
        links = 1 if self.fabric in (Fabric.TCP, Fabric.SHARED_MEMORY) else min(prefill, decode)
        rate = links * link_peak(self.gpu, self.fabric) * FABRICS[self.fabric].efficiency
        rate *= _FABRIC_FACTORS.get(self.efficiency, 1.0)
        return TransferCost(TRANSFER_PRIOR.latency, 1.0 / rate)

    def prompt_seconds(self, pool: Pool, tokens: int) -> float:
        """Seconds that an idle pod computes a prompt."""
        return prompt_seconds(self.step(pool.tensor), 0, tokens, pool.batching.budget)

    def serve(self, deployment: Deployment, requests: Sequence[Request], slo: Slo) -> Served:
        """Simulate `requests`, in order of time, on a deployment."""
        prefill = deployment.prefill
        link = self.transfer(prefill.tensor, deployment.decode.tensor) if prefill else None
        decodes = self._pods(deployment.decode, 1000, link)
        prefills = self._pods(prefill, 0, None) if prefill else []
        return self._simulate(requests, prefills, decodes, slo)

    def answer(self, pool: Pool, requests: Sequence[Request], slo: Slo) -> Served:
        """Simulate the answers alone: the prompts' KV is on decode pods at the requests' times."""
        computed = [request._replace(is_computed=True) for request in requests]
        return self._simulate(computed, [], self._pods(pool, 1000, None), slo)

    def _simulate(
        self,
        requests: Sequence[Request],
        prefills: Sequence[Engine],
        decodes: Sequence[Engine],
        slo: Slo,
    ) -> Served:
        pods = [*prefills, *decodes]
        numbers = range(len(pods))
        pools = Pools(numbers[: len(prefills)], numbers[len(prefills) :]) if prefills else None
        result = simulate(requests, pods, LeastWork(pods, pools), timing=AT_ONCE, is_lazy=True)
        for served in result.served:
            served.sent -= self.request
        begin, last = requests[0].at - self.request, requests[-1].at - self.request
        seconds = max(served.e2e + served.sent for served in result.served) - begin
        arriving = last - begin or seconds
        return Served(
            measures=measure(
                replace(result, served=result.served[int(WARM_UP * len(requests)) :]), slo
            ),
            prefill_busy=_busy(prefills, arriving),
            decode_busy=_busy(decodes, seconds),
            link_busy=sum(p.link.busy for p in decodes if p.link) / len(decodes) / arriving,
            preemptions=int(sum(pod.totals["preemptions"] for pod in pods)),
        )

    def _pods(self, pool: Pool, seed: int, cost: TransferCost | None) -> list[Engine]:
        step, tokens = self.step(pool.tensor), self.memory(pool.tensor, pool.batching).tokens
        size = self.kv_size(pool.tensor)
        return [
            Engine(
                step,
                cache_tokens=tokens,
                seed=seed + i,
                batching=pool.batching,
                link=Link(cost, size, streamed=self.streamed) if cost else None,
            )
            for i in range(pool.replicas)
        ]


def link_peak(gpu: Gpu, fabric: Fabric) -> float:
    """Bytes per second and direction of the link that a GPU, or with TCP a pod, has to others.
    Raises CannotServe."""
    match fabric:
        case Fabric.NVLINK:
            if not gpu.nvlink:
                raise CannotServe(f"{gpu.title} has no NVLink: choose another fabric")
            return gpu.nvlink
        case Fabric.PCIE:
            return gpu.pcie
        case Fabric.RDMA:
            return gpu.nic
    return FABRICS[fabric].peak


def _busy(pods: Sequence[Engine], seconds: float) -> float:
    """Share of the time that pods compute; 0 without pods."""
    return min(1.0, sum(pod.busy for pod in pods) / len(pods) / seconds) if pods else 0.0


def _giga(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
