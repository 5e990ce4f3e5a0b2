"""What suits a pool's role where its spec leaves the choice open (`engine.tuning: auto`).

Prefill is bound by compute: large steps, and little memory for KV that soon leaves. Decode is
bound by memory: many sequences and all the KV cache there can be. A pool that does both is left
to vLLM, as is anything on CPU, where a share of the accelerator's memory means nothing.
"""

from dataclasses import dataclass
from typing import Final

from tandem_contract.paths import Role

from ..resources.spec import PoolSpec


@dataclass(frozen=True)
class Tuning:
    """Values of vLLM's flags; None leaves one to vLLM."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None
    all2all_backend: str | None = None


_NONE: Final = Tuning()
_FOR_ROLE: Final = {
    Role.PREFILL: Tuning(
        max_num_batched_tokens=32768,
        gpu_memory_utilization=0.85,
        all2all_backend="deepep_high_throughput",
    ),
    Role.DECODE: Tuning(
        max_num_seqs=512,
        gpu_memory_utilization=0.95,
        prefix_caching=True,
        all2all_backend="deepep_low_latency",
    ),
}


def tuning(spec: PoolSpec, role: Role) -> Tuning:
    """The flags of a pool's vLLM: what the user chose, else what suits `role`."""
    engine, sizes = spec.engine, spec.parallelism
    auto = engine.tuning == "auto" and spec.accelerator.count > 0
    best = _FOR_ROLE.get(role, _NONE) if auto else _NONE
    # Experts are exchanged between data-parallel ranks only.
    exchanged = sizes.expert and sizes.data > 1
    return Tuning(
        engine.max_num_batched_tokens or best.max_num_batched_tokens,
        engine.max_num_seqs or best.max_num_seqs,
        engine.gpu_memory_utilization or best.gpu_memory_utilization,
        best.prefix_caching,
        sizes.all2all_backend or (best.all2all_backend if exchanged else None),
    )
