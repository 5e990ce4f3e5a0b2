"""A deployment as custom resources: a PrefillPool and a DecodePool, or one pool that does both."""

import re
from typing import Any

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.durations import format_duration
from tandem_planner.sizing.search import Target

from .report import Option, PoolAnswer

_LONGEST_NAME = 40


def resources(
    option: Option,
    *,
    model: str,
    gpu: str,
    resource: str,
    objective: Target,
    utilization: float,
    cache_dtype: str,
) -> list[dict[str, Any]]:
    """The pools of `option`. `model`: name of a repository, or a directory; `resource`: what the
    nodes call a GPU."""
    name = _name(model)

    def spec(pool: PoolAnswer) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "maxNumBatchedTokens": pool.max_num_batched_tokens,
            "maxNumSeqs": pool.max_num_seqs,
            "gpuMemoryUtilization": utilization,
        }
        return {
            "engine": engine,
            "parallelism": {"tensor": pool.tensor},
            "accelerator": {"resource": resource, "count": pool.tensor, "type": gpu},
            "replicas": pool.replicas,
        }

    shared: dict[str, Any] = {"model": {"name": model}}
    if cache_dtype != "auto":
        shared["engine"] = {"kvCacheDtype": cache_dtype}
    decode = spec(option.decode) | {"routing": {"slo": _slo(objective)}}
    if option.prefill is None:
        return [_resource(DECODE_POOL, name, _merged(shared, decode | {"role": "unified"}))]
    prefill_name = f"{name}-prefill"
    return [
        _resource(PREFILL_POOL, prefill_name, _merged(shared, spec(option.prefill))),
        _resource(DECODE_POOL, name, {"prefillRef": {"name": prefill_name}} | decode),
    ]


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def _merged(shared: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    engine = shared.get("engine", {}) | spec["engine"]
    return shared | spec | {"engine": engine}


def _slo(objective: Target) -> dict[str, Any]:
    limits = {"ttft": objective.slo.ttft, "itl": objective.slo.itl}
    text = {name: format_duration(limit) for name, limit in limits.items() if limit is not None}
    return text | {"attainment": objective.attainment}


def _name(model: str) -> str:
    """A name for the pools: the model's own, as Kubernetes allows it."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    name = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_LONGEST_NAME].strip("-")
    return name if name and name[0].isalpha() else f"model-{name}".strip("-")
