"""Pods from pools: names, labels, templates, placement; and the static router configuration."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import labels
from tandem_contract.config import router_config as parse_router_config
from tandem_contract.documents import Document, load_documents
from tandem_contract.paths import Role
from tandem_operator.pods import drain_hook, prestop, startup
from tandem_operator.pods.manifests import label_value, plan_key_secrets, pod, pods, template
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.resolve import Defaults, own_version
from tandem_operator.routing.endpoint.requirements import static_router_config

from .pool_yaml import decode_pool, documents, pair, prefill_pool
from .rendered_pods import TORCH, engine, rendered, sidecar

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_golden_pods(name: str) -> None:
    """Complete pods. After an intended change, copy the JSON of the failure into the file."""
    (pool_set,) = parse_pools(load_documents(HERE / "golden" / f"{name}.yaml"))
    manifests = json.dumps(pods(pool_set), indent=2).replace(
        f"tandem:{own_version()}", "tandem:OWN"
    )
    sources = (("PRESTOP", prestop), ("DRAIN", drain_hook), ("STARTUP", startup))
    for word, module in sources:
        manifests = manifests.replace(json.dumps(inspect.getsource(module)), f'"{word}"')
    assert json.loads(manifests) == json.loads((HERE / "golden" / f"{name}.json").read_text()), (
        manifests
    )


def test_names_are_pool_revision_index() -> None:
    (pool_set,) = pair({"replicas": 2}, {"replicas": 3})
    revision = pool_set.decodes[0].revision
    assert [p["metadata"]["name"] for p in pods(pool_set)][2:] == [
        f"d-{revision}-{i}" for i in range(3)
    ]


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        ({"replicas": None}, 1),
        ({"replicas": 0}, 0),
        ({"replicas": None, "scaling": {"minReplicas": 2, "maxReplicas": 4}}, 2),
    ],
)
def test_initial_number_of_pods(spec: dict[str, Any], count: int) -> None:
    bodies = pods(pair(spec)[0])
    assert sum(pod["metadata"]["labels"][labels.POOL] == "p" for pod in bodies) == count


def test_labels_name_pool_role_model_revision_and_compat() -> None:
    prefill, decode = (pod["metadata"]["labels"] for pod in rendered())
    assert (prefill[labels.POOL], decode[labels.POOL]) == ("p", "d")
    assert prefill[labels.MODEL] == "org-model"
    assert prefill[labels.KV_COMPAT] == decode[labels.KV_COMPAT]
    assert prefill[labels.REVISION] != decode[labels.REVISION]
    assert (prefill[labels.LLMD_ROLE], decode[labels.LLMD_ROLE]) == ("prefill", "decode")


@given(st.text())
def test_any_model_name_makes_a_label_value(text: str) -> None:
    value = label_value(text)
    assert len(value) <= 63
    assert not value or (value[0].isalnum() and value[-1].isalnum() and value.isascii())


def test_plan_keys_are_mounted_only_with_tandems_epp() -> None:
    (pool_set,) = pair({}, {"routing": {"endpoint": "chat"}})
    assert plan_key_secrets([pool_set]) == {"chat-plan-keys"}
    mounted = json.dumps(pods(pool_set)[1])
    assert '"secretName": "chat-plan-keys"' in mounted
    (foreign,) = pair({}, {"routing": {"epp": {"enabled": False}}})
    assert plan_key_secrets([foreign]) == frozenset()
    assert "plan-key" not in json.dumps(pods(foreign))


def test_a_template_is_merged_but_cannot_change_tandems_labels() -> None:
    template = {
        "metadata": {"labels": {"team": "a", labels.ROLE: "x"}, "annotations": {"n": "1"}},
        "spec": {
            "priorityClassName": "high",
            "containers": [{"name": "engine", "resources": {"limits": {"memory": "64Gi"}}}],
            "initContainers": [{"name": "sidecar", "image": "mine"}],
        },
    }
    _, decode = rendered({}, {"template": template})
    assert decode["metadata"]["labels"]["team"] == "a"
    assert decode["metadata"]["labels"][labels.ROLE] == "decode"
    assert decode["metadata"]["annotations"]["n"] == "1"
    assert decode["spec"]["priorityClassName"] == "high"
    assert engine(decode)["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "64Gi"}
    assert sidecar(decode)["image"] == "mine"
    assert sidecar(decode)["command"] == ["tandem-sidecar"]


def test_placement_is_a_preferred_affinity() -> None:
    prefill, decode = rendered(
        {"placement": {"topologyKey": "rack"}}, {"placement": {"topologyKey": "rack"}}
    )
    assert prefill["spec"]["affinity"] == decode["spec"]["affinity"]
    assert list(prefill["spec"]["affinity"]["podAffinity"]) == [
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]


def test_a_template_makes_a_pod_with_owner_and_labels() -> None:
    (pool_set,) = pair()
    assert pool_set.prefill is not None
    pod_template = template(pool_set.prefill)
    owner = {"kind": "PrefillPool", "name": "p", "uid": "1"}
    created = pod(pod_template, name="n", namespace="ns", owner=owner, labels={"more": "1"})
    assert created["metadata"]["ownerReferences"] == [owner]
    assert created["metadata"]["labels"] == {**pod_template["metadata"]["labels"], "more": "1"}
    assert created["metadata"]["annotations"][labels.SERVED_MODELS] == '["org/model"]'
    assert created["spec"] == pod_template["spec"]
    assert not any(
        key.startswith(labels.ENDPOINT_PREFIX) for key in pod_template["metadata"]["labels"]
    )
    (local, *_) = pods(pool_set)
    assert local["metadata"]["labels"][labels.endpoint_label("d")] == "prefill"


def test_kueue_labels_are_copied_to_pods_and_change_the_revision() -> None:
    queued = prefill_pool()
    queued["metadata"] = {"name": "p", "labels": {"kueue.x-k8s.io/queue-name": "q", "team": "a"}}
    (pool_set,) = parse_pools(documents(queued, decode_pool()))
    (first, *_) = pods(pool_set)
    assert first["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert "team" not in first["metadata"]["labels"]
    plain = pair()[0].prefill
    assert plain is not None
    assert pool_set.prefill is not None
    assert pool_set.prefill.revision != plain.revision


def test_images_come_from_the_defaults() -> None:
    mirror = Defaults(
        tandem_image="r/tandem:9", vllm_repository="r:5000/vllm", pull_policy="Always",
        torch_image="r:5000/tandem-engine:dev",
    )  # fmt: skip
    (pool_set,) = parse_pools(documents(prefill_pool(), decode_pool()), mirror)
    prefill, decode, *_ = pods(pool_set, mirror)
    assert engine(prefill)["image"] == f"r:5000/vllm:v{mirror.vllm_version}"
    assert (sidecar(decode)["image"], sidecar(decode)["imagePullPolicy"]) == (
        "r/tandem:9", "Always",
    )  # fmt: skip

    def torch(version: dict[str, str]) -> str:
        spec = {**TORCH, "engine": {"type": "torch", **version}}
        image: str = engine(pods(parse_pools(documents(prefill_pool(**spec)), mirror)[0])[0])[
            "image"
        ]
        return image

    assert torch({}) == "r:5000/tandem-engine:dev"
    assert torch({"version": "0.9.0"}) == "r:5000/tandem-engine:0.9.0"


def test_the_static_router_configuration() -> None:
    (pool_set,) = pair({}, {"sidecar": {"prefillTimeout": "5s", "fallbackToUnified": False}})
    addresses = {p["metadata"]["name"]: f"127.0.1.{i}" for i, p in enumerate(pods(pool_set))}
    data = static_router_config([pool_set], addresses)
    config = parse_router_config(Document("router.yaml", data), {})
    assert config.disaggregated_serving.enabled
    assert config.disaggregated_serving.prefill_timeout is None
    assert not config.disaggregated_serving.fallback_to_unified
    assert [(b.name, b.role, b.address, b.models) for b in config.backends] == [
        (name, role, f"{address}:8000", ("org/model",))
        for (name, address), role in zip(
            addresses.items(), (Role.PREFILL, Role.DECODE, Role.DECODE), strict=True
        )
    ]


def test_the_static_router_configuration_has_the_pools_picker_configuration() -> None:
    plugins = [{"type": "random-picker"}]
    config = {"plugins": plugins, "disaggregated_serving": {"enabled": False}}
    epp = {"config": config, "healthChecks": {"interval": "9s"}}
    (pool_set,) = pair({}, {"routing": {"epp": epp}})
    addresses = {p["metadata"]["name"]: "127.0.1.1" for p in pods(pool_set)}
    data = static_router_config([pool_set], addresses)
    assert (data["plugins"], data["health_checks"]) == (plugins, {"interval": "9s"})
    assert data["disaggregated_serving"]["enabled"]


def test_split_off_turns_disaggregation_off() -> None:
    (pool_set,) = pair({}, {"routing": {"split": "off"}})
    addresses = {p["metadata"]["name"]: "127.0.1.1" for p in pods(pool_set)}
    assert not static_router_config([pool_set], addresses)["disaggregated_serving"]["enabled"]


def test_a_pod_without_an_address_is_an_error() -> None:
    with pytest.raises(KeyError, match="p-"):
        static_router_config(pair(), {})
