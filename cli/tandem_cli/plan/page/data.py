"""What the page knows of a model on a GPU, as values: steps, memory, links, and where it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Final

import msgspec

from tandem_planner.fabrics import Fabric
from tandem_planner.kv_size import KvSize
from tandem_planner.simulation.engine import Batching
from tandem_planner.simulation.measures import Slo
from tandem_planner.sizing.deployments import CannotServe, Deployment, Estimate, Pool
from tandem_planner.sizing.model_shape import ModelShape
from tandem_planner.sizing.roofline import ASSUMED, BEST, WORST, RooflineStep
from tandem_planner.sizing.search import DECODE, PREFILL
from tandem_planner.step_cost import LinearStep, StepCost, prompt_seconds

COLOCATED: Final = Batching(2048, 256)
"""Of co-located pods, unless the page says otherwise."""
_LONG, _SHORT, _LONG_SHARE = 3000, 125, 0.25
"""Mean tokens of the prompts that the page starts with, and the share of the long ones."""
_LONGEST: Final = 6000
"""Tokens of a request for which a pod must have room that is of no deployment found."""
_BUSY: Final = 0.35
"""Share of the time that one prefill pod computes at the rate that the page starts with."""
_FABRICS: Final = {
    Fabric.NVLINK: "NVLink", Fabric.RDMA: "RDMA", Fabric.PCIE: "PCIe", Fabric.TCP: "TCP, 10 Gbit/s",
}  # fmt: skip
_EFFICIENCIES: Final = {"assumed": ASSUMED, "best": BEST, "worst": WORST}


Coefficients = Sequence[float] | Mapping[str, float | KvSize]
"""Of a `LinearStep`, or of a roofline by name."""


class PodKind(msgspec.Struct, frozen=True, rename="camel"):
    """Pods of one role."""

    tensor: int
    """GPUs of each."""
    budget: int
    """Tokens per step."""
    requests: int
    """In the batch."""
    tokens: int
    """Of KV that fit."""
    steps: Mapping[str, Coefficients]
    """`assumed`, `best` and `worst` → coefficients of a step."""


class FabricOption(msgspec.Struct, frozen=True):
    """What KV may move over."""

    title: str
    rates: Mapping[str, float]
    """`assumed`, `best` and `worst` → bytes per second that a decode pod receives."""


class ModelOption(msgspec.Struct, frozen=True, rename="camel"):
    """A model, for the calculator."""

    title: str
    tensor: int
    steps: Mapping[str, Coefficients]
    """As of `PodKind`."""
    budget: int
    kv: KvSize
    """Bytes of a prompt's KV that a decode pod reads, copies of heads included."""
    fabrics: list[FabricOption]


class Start(msgspec.Struct, frozen=True, rename="camel"):
    """Where the page starts, in the units of its controls."""

    rate: float
    prefills: int
    decodes: int
    colocated: int
    bandwidth: float
    """GB/s."""
    ttft: float | None
    """Seconds; None: no limit, here and below."""
    itl: float | None
    """Milliseconds."""
    e2e: float | None
    """Seconds."""
    attainment: float
    """Percent."""


class PageData(msgspec.Struct, frozen=True, rename="camel"):
    """All that the page is made of."""

    model: str
    gpu: str
    is_calibrated: bool
    error: float
    """Of a profile: by how much its steps may be off, as a share."""
    longest: int | None
    """Tokens of the longest prompt that was measured; None: none was."""
    request: float
    """Seconds of a request beside its steps."""
    prefill: PodKind
    decode: PodKind
    colocated: PodKind
    kv: KvSize
    latency: float
    """Seconds of a transfer of no bytes."""
    fabrics: list[FabricOption]
    models: list[ModelOption]
    start: Start
    experiment_rate: float
    """Requests per second of the experiments."""
    answer: str
    """What `tandem plan` says of the workload it was asked about."""
    version: str


def page_data(
    estimate: Estimate,
    deployments: Sequence[Deployment],
    *,
    model: str,
    others: Mapping[str, ModelShape],
    longest: int | None = None,
    rate: float | None = None,
    slo: Slo,
    attainment: float,
    answer: str = "",
) -> PageData:
    """The page starts with the first of `deployments` that is split, and the first that is not,
    or with one pod of the smallest size with room for `_LONGEST` tokens. `others`: models for the
    calculator. Raises CannotServe where no size has."""
    split = next((d for d in deployments if d.prefill is not None), None)
    together = next((d for d in deployments if d.prefill is None), None)
    prefill = split.prefill if split and split.prefill else _smallest(estimate, PREFILL)
    decode = split.decode if split else _smallest(estimate, DECODE)
    colocated = together.decode if together else _smallest(estimate, COLOCATED)
    if not together:
        gpus = prefill.gpus + decode.gpus
        colocated = colocated._replace(replicas=max(1, gpus // colocated.tensor))
    kind = _kind(estimate, prefill)
    mean = _LONG_SHARE * _LONG + (1 - _LONG_SHARE) * _SHORT
    seconds = prompt_seconds(estimate.step(prefill.tensor), 0, round(mean), kind.budget)
    usual = float(f"{_BUSY / seconds:.2g}")
    link = estimate.transfer(prefill.tensor, decode.tensor)
    return PageData(
        model=model,
        gpu=estimate.gpu.title,
        is_calibrated=estimate.measured is not None,
        error=estimate.measured_error,
        longest=longest,
        request=estimate.request,
        prefill=kind,
        decode=_kind(estimate, decode),
        colocated=_kind(estimate, colocated),
        kv=estimate.kv_size(decode.tensor),
        latency=link.latency,
        fabrics=_fabrics(estimate, prefill.tensor, decode.tensor),
        models=[_option(estimate, model, prefill, decode), *_others(estimate, others)],
        start=Start(
            rate=usual if rate is None or not split else rate,
            prefills=prefill.replicas,
            decodes=decode.replicas,
            colocated=colocated.replicas,
            bandwidth=float(f"{1 / link.per_byte / 1e9:.4g}"),
            ttft=slo.ttft,
            itl=None if slo.itl is None else 1e3 * slo.itl,
            e2e=slo.e2e,
            attainment=100 * attainment,
        ),
        experiment_rate=usual,
        answer=answer,
        version=version("tandem-llm"),
    )


def _smallest(estimate: Estimate, batching: Batching) -> Pool:
    return Pool(1, estimate.tensor_sizes(batching, _LONGEST)[0], batching)


def _kind(estimate: Estimate, pool: Pool) -> PodKind:
    return PodKind(
        tensor=pool.tensor,
        budget=pool.batching.budget,
        requests=pool.batching.requests,
        tokens=estimate.memory(pool.tensor, pool.batching).tokens,
        steps=_steps(estimate, pool.tensor),
    )


def _steps(estimate: Estimate, tensor: int) -> Mapping[str, Coefficients]:
    return {
        name: coefficients(estimate.assuming(efficiency).step(tensor))
        for name, efficiency in _EFFICIENCIES.items()
    }


def coefficients(step: StepCost) -> Coefficients:
    """As kernel.js takes them."""
    if isinstance(step, RooflineStep):
        return {_camel(name): value for name, value in step.coefficients()._asdict().items()}
    if isinstance(step, LinearStep):
        return tuple(step)
    raise TypeError(f"no coefficients of {type(step).__name__}")


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _fabrics(estimate: Estimate, prefill: int, decode: int) -> list[FabricOption]:
    options = []
    for fabric, title in _FABRICS.items():
        other = replace(estimate, fabric=fabric)
        try:
            rates = {
                name: 1 / other.assuming(efficiency).transfer(prefill, decode).per_byte
                for name, efficiency in _EFFICIENCIES.items()
            }
        except CannotServe:
            continue
        options.append(FabricOption(title, rates))
    return options


def _option(estimate: Estimate, title: str, prefill: Pool, decode: Pool) -> ModelOption:
    return ModelOption(
        title=title,
        tensor=prefill.tensor,
        steps=_steps(estimate, prefill.tensor),
        budget=prefill.batching.budget,
        kv=estimate.kv_size(decode.tensor),
        fabrics=_fabrics(estimate, prefill.tensor, decode.tensor),
    )


def _others(estimate: Estimate, shapes: Mapping[str, ModelShape]) -> Sequence[ModelOption]:
    """Those that fit on the GPU, on as few of it as possible."""
    options = []
    for title, shape in shapes.items():
        other = replace(estimate, model=shape, weights=None, measured=None)
        try:
            pool = _smallest(other, PREFILL)
        except CannotServe:
            continue
        options.append(_option(other, title, pool, pool))
    return options
