"""Fields that other fields leave without effect: refused when written, admitted while unchanged."""

import asyncio
from typing import Any

import pytest

from tandem_kube.client import Api
from tandem_kube.errors import Invalid
from tandem_kube.resources import Object, Resource
from tandem_operator.planning.validation import validate_set
from tandem_operator.resources.resolve import without_inert_fields

from ..cluster.control_plane import ControlPlane
from .operating import DECODE_POOLS, PREFILL_POOLS, api_of
from .pool_yaml import decode_pool, prefill_pool

LOCAL = {"huggingface": None, "pvc": {"claimName": "models"}}
MODEL = {"name": "m", "source": {"huggingface": {}}}
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "revision": (
        {"model": {**MODEL, "revision": "a"}},
        {"model": {"source": LOCAL}},
        {"model": {"revision": "b"}},
    ),
    "cache": (
        {"model": {**MODEL, "cache": {"claimName": "a"}}},
        {"model": {"source": LOCAL}},
        {"model": {"cache": {"claimName": "b"}}},
    ),
    "kvCacheDtype": (
        {"engine": {"kvCacheDtype": "fp8"}, "model": {"name": "m", "source": {"path": "/m"}}},
        {"engine": {"type": "torch"}},
        {"engine": {"kvCacheDtype": "auto"}},
    ),
    "gpuMemoryUtilization": (
        {"engine": {"gpuMemoryUtilization": 0.9}, "model": {"name": "m", "source": {"path": "/m"}}},
        {"engine": {"type": "torch"}},
        {"engine": {"gpuMemoryUtilization": 0.8}},
    ),
    "all2allBackend": (
        {"parallelism": {"expert": True, "all2allBackend": "deepep_low_latency"}},
        {"parallelism": {"expert": False}},
        {"parallelism": {"all2allBackend": "deepep_high_throughput"}},
    ),
    "connectors": (
        {"transfer": {"connector": "multi", "connectors": [{"connector": "nixl"}]}},
        {"transfer": {"connector": "nixl"}},
        {"transfer": {"connectors": [{"connector": "mooncake"}]}},
    ),
    "replicas": (
        {"replicas": 2},
        {"scaling": {"maxReplicas": 3}},
        {"replicas": 3},
    ),
}  # fmt: skip
"""Field → a spec in which it counts, an edit after which it does not, and a change of it alone."""
GATEWAY: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gatewayRef": (
        {"routing": {"gatewayRef": {"name": "a"}, "inferencePool": {"enabled": True}}},
        {"routing": {"inferencePool": {"enabled": False}}},
        {"routing": {"gatewayRef": {"name": "b"}}},
    )
}  # fmt: skip
CASES = [
    *((name, PREFILL_POOLS, prefill_pool(**spec), *edits)
      for name, (spec, *edits) in SHARED.items()),
    *((name, DECODE_POOLS, decode_pool(**{"model": {"name": "m"}, **spec}), *edits)
      for name, (spec, *edits) in {**SHARED, **GATEWAY}.items()),
]  # fmt: skip


@pytest.mark.control_plane
async def test_a_field_that_loses_its_effect_stays_until_it_is_changed(
    crds: ControlPlane, namespace: str
) -> None:
    async with api_of(crds.kubeconfig) as api:
        await asyncio.gather(
            *(
                _is_ratcheted(api, namespace, f"{case[0].lower()}-{i}", *case[1:])
                for i, case in enumerate(CASES)
            )
        )


async def _is_ratcheted(
    api: Api,
    namespace: str,
    name: str,
    resource: Resource,
    pool: Object,
    edit: Object,
    change: Object,
) -> None:
    async def patch(spec: Object) -> Object:
        return await api.patch(resource, name, {"spec": spec}, namespace)

    pool["metadata"] = {"name": name, "namespace": namespace}
    before = (await api.create(resource, pool))["spec"]
    after = (await patch(edit))["spec"]
    # Every field that the change is about is still as it was.
    for section, value in change.items():
        for field in value if isinstance(value, dict) else ():
            assert after[section][field] == before[section][field], name
    # The pool and the very section stay editable, and written as a whole, as GitOps tools do.
    await patch({"paused": True, "model": {"servedNames": ["n"]}, "drain": {"timeout": "60s"}})
    kept = await api.get(resource, name, namespace)
    kept["spec"]["paused"] = False
    await api.replace(resource, kept)
    with pytest.raises(Invalid):
        await patch(change)
    # Back again: the field counts, and may change.
    await patch(_undone(edit, pool["spec"]))
    await patch(change)


def _undone(edit: Object, before: Object) -> Object:
    """The merge patch that brings the fields of `edit` back to `before`."""
    return {
        name: _undone(value, before[name])
        if isinstance(value, dict) and isinstance(before.get(name), dict)
        else before.get(name)
        for name, value in edit.items()
    }


@pytest.mark.parametrize("name", [*SHARED, *GATEWAY])
def test_a_field_without_effect_changes_neither_pods_nor_peers(name: str) -> None:
    spec, edit, _ = {**SHARED, **GATEWAY}[name]
    if name == "replicas":
        assert "replicas" not in without_inert_fields({**spec, **edit})
        return
    pools = []
    for remove in (False, True):
        pool = decode_pool(role="unified", prefillRef=None, model=dict(MODEL))
        pool["metadata"]["namespace"] = "default"
        for changes in (spec, edit):
            for section, values in changes.items():
                merged = {**pool["spec"].get(section, {}), **values}
                pool["spec"][section] = {k: v for k, v in merged.items() if not remove or k != name}
        validation = validate_set(None, [pool]).decodes["d"]
        assert validation.rejection is None, validation
        assert validation.pool is not None
        pools.append(validation.pool)
    inert, without = pools
    assert inert == without


def test_a_spec_of_another_shape_is_left_to_validation() -> None:
    pool = prefill_pool(transfer=1)
    pool["metadata"]["namespace"] = "default"
    validation = validate_set(pool, []).prefill
    assert validation is not None
    assert validation.rejection is not None
