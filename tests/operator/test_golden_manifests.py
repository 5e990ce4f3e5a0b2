"""Golden manifests: every object the operator writes for representative pools, with the revision
hashes of their pods.

A changed revision hash restarts the pods of every user who upgrades, and a changed template makes
the operator report UpdateAvailable. So a change of the golden file needs a reason, stated in its
commit. `python -m tests.operator.test_golden_manifests` writes the file anew; `git diff` then shows
what users will see.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tandem_operator.observed import EndpointKey, Observed
from tandem_operator.planning import api_objects
from tandem_operator.planning.plan import plan_set
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.pools import PoolSet
from tandem_operator.resources.resolve import Defaults
from tandem_operator.resources.schema import defaulted
from tandem_operator.routing.endpoint.observed import (
    OPTIONAL_KINDS,
    EndpointPool,
    ObservedEndpoint,
)
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings

from .full_pools import FULL
from .pool_yaml import decode_pool, documents, prefill_pool
from .test_policies import POLICY

GOLDEN = Path(__file__).parent / "golden" / "manifests.json"
NOW = 1_800_000_000.0
DEFAULTS = Defaults(
    tandem_image="tandem:golden", torch_image="tandem-engine:golden", vllm_version="0.32.0"
)
SETTINGS = RouterSettings(tandem_image="tandem:golden", envoy_image="envoy:golden")
PLACED = RouterSettings(
    tandem_image="registry/tandem:golden",
    envoy_image="envoy:golden",
    image_pull_policy="Always",
    image_pull_secrets=("registry",),
    envoy_threads=2,
    envoy_replicas=3,
    epp_replicas=3,
    envoy_resources={"limits": {"memory": "2Gi"}},
    epp_resources={"requests": {"cpu": 2}},
    node_selector={"disk": "fast"},
    tolerations=({"key": "router", "operator": "Exists"},),
    priority_class="high",
    network_policy=POLICY,
)

Objects = list[dict[str, Any]]


def pair(both: dict[str, Any] | None = None, **decode: Any) -> Objects:
    """A PrefillPool with these spec fields and a DecodePool that inherits them."""
    return [prefill_pool(**(both or {})), decode_pool(**{"replicas": 1, **decode})]


def unified_pool(**spec: Any) -> Objects:
    """A DecodePool without a PrefillPool."""
    pool = decode_pool(**{"replicas": 1, "role": "unified", "model": {"name": "org/model"}, **spec})
    del pool["spec"]["prefillRef"]
    return [pool]


def annotated(pools: Objects, **metadata: Any) -> Objects:
    return [{**pool, "metadata": {**pool["metadata"], **metadata}} for pool in pools]


def on_vllm(engine: str, **transfer: Any) -> dict[str, Any]:
    """Fields of a pair on vLLM `engine` with this `transfer` section."""
    return {"engine": {"version": engine}, "transfer": transfer}


_CHAIN = [
    {"connector": "nixl", "extraConfig": {"num_threads": 4}},
    {"connector": "offloading", "extraConfig": {"cpu_bytes_to_use": 1 << 34}},
]
_EXPERTS = {
    "parallelism": {"tensor": 1, "data": 4, "expert": True},
    "accelerator": {"count": 4, "type": "H100", "nodeSelector": {"gpu": "h100"}},
    "transfer": {"rdma": {"resource": "rdma/ib", "count": 2}, "requireRdma": True},
}
_TINY = {
    "model": {"name": "tiny", "source": {"tiny": {"seed": 3}}},
    "engine": {"type": "torch", "version": "1.2.3", "dtype": "float64"},
    "accelerator": {"count": 0},
}
_TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "priorityClassName": "high",
        "enableServiceLinks": None,
        "containers": [
            {"name": "engine", "tty": True, "env": [{"name": "POD_IP", "$patch": "delete"}]},
            {"name": "logs", "image": "logs:1"},
        ],
    },
}

POOLS: dict[str, Objects] = {
    "torch": pair(_TINY, accelerator={"count": 0}),
    "nixl": pair(),
    "nixl on vLLM 0.13": pair(on_vllm("0.13.0", connector="nixl", backends=["UCX"])),
    "nixl-push": pair(on_vllm("0.32.0", connector="nixl-push", bufferDevice="cpu")),
    "multi": pair(on_vllm("0.32.0", connector="multi", connectors=_CHAIN)),
    "mooncake": pair(on_vllm("0.32.0", connector="mooncake", rdma={"resource": "rdma/ib"})),
    "offloading": pair(on_vllm("0.32.0", connector="offloading", sideChannelPort=5700)),
    "lmcache": pair(on_vllm("0.32.0", connector="lmcache",
                            extraConfig={"lmcache.remote_url": "redis://store:6379"})),
    "lmcache-mp": pair(on_vllm("0.32.0", connector="lmcache-mp")),
    "experts": pair(_EXPERTS, parallelism=_EXPERTS["parallelism"],
                    accelerator=_EXPERTS["accelerator"]),
    "experts on vLLM 0.11": unified_pool(
        engine={"version": "0.11.0"},
        parallelism={"data": 2, "expert": True, "all2allBackend": "pplx"},
        accelerator={"count": 2},
    ),
    "unified": unified_pool(),
    "template": pair({"template": _TEMPLATE}, template=_TEMPLATE),
    "every field": [copy.deepcopy(FULL[0]), copy.deepcopy(FULL[6])],
    "scaled": [copy.deepcopy(FULL[1]), copy.deepcopy(FULL[7])],
    "model in an image": [copy.deepcopy(FULL[4]), copy.deepcopy(FULL[10])],
    "model in S3": [copy.deepcopy(FULL[5]), copy.deepcopy(FULL[11])],
    "another picker": pair(routing={"epp": {"enabled": False}, "endpoint": "chat"}),
    "sidecar": pair(sidecar={"prefillTimeout": "20s", "kvTransferTimeout": "5s", "retries": 1,
                             "fallbackToUnified": False}, drain={"timeout": "60s"}),
    "restarted and queued": annotated(
        pair(), annotations={"tandem.dev/restartedAt": "2026-01-31T10:00:00Z"},
        labels={"kueue.x-k8s.io/queue-name": "gpus", "team": "a"},
    ),
    "several replicas": [prefill_pool(replicas=2), decode_pool(replicas=5)],
}  # fmt: skip

ENDPOINTS: dict[str, tuple[Objects, RouterSettings]] = {
    "one pool": (POOLS["nixl"], SETTINGS),
    "placed": (POOLS["nixl"], PLACED),
    "every field": (POOLS["every field"], SETTINGS),
    "another picker": (POOLS["another picker"], SETTINGS),
    "API keys": (
        pair(routing={"envoy": {"enabled": True, "apiKeySecretRef": {"name": "clients"}}}),
        SETTINGS,
    ),
    "Envoy and gateway": (
        pair(routing={"inferencePool": {"enabled": True}, "gatewayRef": {"name": "g"},
                      "epp": {"enabled": True, "replicas": 2}}),
        SETTINGS,
    ),
}  # fmt: skip


def test_the_pods_revisions_and_budgets_of_pools_are_as_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text())["pools"]
    assert recorded.keys() == POOLS.keys()
    for name in POOLS:
        assert rendered_pools(name) == recorded[name], name


def test_the_router_objects_of_endpoints_are_as_recorded() -> None:
    recorded = json.loads(GOLDEN.read_text())["endpoints"]
    assert recorded.keys() == ENDPOINTS.keys()
    for name in ENDPOINTS:
        assert rendered_endpoint(name) == recorded[name], name


@pytest.mark.parametrize("name", POOLS)
def test_pods_are_created_as_their_revision_pins_them(name: str) -> None:
    plan = plan_set(observed_set(name), DEFAULTS)
    templates = {c.body["metadata"]["name"]: c.body["data"] for c in plan.create_revisions}
    for create in plan.create_pods:
        template = templates[create.name.rpartition("-")[0]]
        assert create.body["spec"] == template["spec"]


def rendered_pools(case: str) -> Any:
    """The objects that the first pass over a set of new pools creates, and what files give."""
    plan = plan_set(observed_set(case), DEFAULTS)
    return plain(
        {
            "hashes": {
                f"{pool.role} {pool.name}": [pool.revision, pool.compat]
                for pool in parsed(POOLS[case]).pools
            },
            "revisions": [create.body for create in plan.create_revisions],
            # The test above compares each pod's spec with its revision's.
            "pods": [create.body["metadata"] for create in plan.create_pods],
            "budgets": [create.body for create in plan.apply_budgets],
        }
    )


def rendered_endpoint(case: str) -> Any:
    """The objects that the first pass over an endpoint creates, in the order of creation."""
    pools, settings = ENDPOINTS[case]
    decodes = parsed(pools).decodes
    (name,) = {pool.spec.routing.endpoint for pool in decodes}
    observed = ObservedEndpoint(
        key=EndpointKey("default", name),
        now=NOW,
        pools=tuple(EndpointPool(f"uid-{pool.name}", pool) for pool in decodes),
        kinds=frozenset(OPTIONAL_KINDS),
        secret=bytes(range(32)),
    )
    return plain(plan_endpoint(observed, settings).apply)


def parsed(pools: Objects) -> PoolSet:
    (pool_set,) = parse_pools(documents(*pools), DEFAULTS)
    return pool_set


def observed_set(case: str) -> Observed:
    """A set of pools that were just created: no pod, no revision, no status.

    The uid names the case: readings are cached by uid and generation.
    """
    bodies = []
    for pool in POOLS[case]:
        body = defaulted(pool["kind"], {**copy.deepcopy(pool)})
        body["spec"]["paused"] = False
        name = body["metadata"]["name"]
        body["metadata"] |= {"namespace": "default", "uid": f"{case}: {name}", "generation": 1}
        bodies.append(body)
    resources = [api_objects.pool_resource(body) for body in bodies]
    return Observed(
        key=api_objects.set_key(bodies[0]),
        now=NOW,
        prefill=next(
            (resource for resource in resources if resource.key.kind == "PrefillPool"), None
        ),
        decodes=tuple(resource for resource in resources if resource.key.kind == "DecodePool"),
    )


def plain(value: Any) -> Any:
    """As JSON holds it."""
    return json.loads(json.dumps(value))


def everything() -> dict[str, Any]:
    return {
        "pools": {name: rendered_pools(name) for name in POOLS},
        "endpoints": {name: rendered_endpoint(name) for name in ENDPOINTS},
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(everything(), indent=1, sort_keys=True) + "\n")
