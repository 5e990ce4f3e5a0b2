"""Fields of a stored spec that its other fields leave without effect. Pure.

The CRDs refuse such a field when it is written, and admit it while it stays as it is: a user may
switch `inferencePool` off and on again under the same `gatewayRef`. To remove it later changes no
pod, so it is in no revision and in no compat hash.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def without_inert_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a spec with the schema's defaults, which need not be valid, without such fields."""
    kept = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in spec.items()
    }
    for section, field in _inert_fields(spec):
        kept.get(section, {}).pop(field, None)
    if "scaling" in kept:
        kept.pop("replicas", None)
    return kept


def _inert_fields(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Section and field, whether or not the spec has them."""
    source = spec.get("model", {}).get("source", {"huggingface": {}})
    if "huggingface" not in source:
        yield from (("model", "revision"), ("model", "cache"))
    if spec.get("engine", {}).get("type") == "torch":
        yield from (("engine", "kvCacheDtype"), ("engine", "gpuMemoryUtilization"))
    if not spec.get("parallelism", {}).get("expert"):
        yield "parallelism", "all2allBackend"
    if spec.get("transfer", {}).get("connector") != "multi":
        yield "transfer", "connectors"
    if not spec.get("routing", {}).get("inferencePool", {}).get("enabled"):
        yield "routing", "gatewayRef"
