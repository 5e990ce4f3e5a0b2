"""The ports at which engines take connections of other engines: variable and label of the pods."""

from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.pods.connectors import HandoffPorts, earlier_handoff_ports
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

from .pool_yaml import documents, pair
from .test_golden_manifests import unified_pool

TORCH = {
    "model": {"name": "tiny", "source": {"tiny": {"seed": 3}}},
    "engine": {"type": "torch"},
    "accelerator": {"count": 0},
}
CHAIN = [{"connector": "nixl"}, {"connector": "offloading"}]
STORED = {"connector": "storage", "storage": {"endpoint": "http://store:8080"}}
VARIABLE = "UCX_TCP_PORT_RANGE"


def ports_of(pod: dict[str, Any]) -> tuple[str | None, str | None]:
    """UCX's range as the engine gets it, and the label."""
    env = pod["spec"]["containers"][0]["env"]
    value = next((entry["value"] for entry in env if entry["name"] == VARIABLE), None)
    return value, pod["metadata"]["labels"].get(labels.HANDOFF_PORTS)


@pytest.mark.parametrize(
    ("spec", "variable", "label"),
    [
        ({}, "20000-20999", "5600_20000-20999"),
        ({"transfer": {"dataPorts": {"first": 9000, "last": 9063}}}, "9000-9063", "5600_9000-9063"),
        ({"transfer": {"connector": "nixl-push"}}, "20000-20999", "5600_20000-20999"),
        ({"transfer": {"connector": "offloading"}}, "20000-20999", "5600_20000-20999"),
        (
            {"transfer": {"connector": "multi", "connectors": CHAIN}},
            "20000-20999", "5600_20000-20999",
        ),
        # The default keeps away from a side channel that is among its ports.
        ({"transfer": {"sideChannelPort": 20_100}}, "21100-22099", "20100_21100-22099"),
        ({"transfer": {"sideChannelPort": 19_990}}, "20990-21989", "19990_20990-21989"),
        # UCX is told, but something else may listen, too.
        ({"transfer": {"connector": "mooncake"}}, "20000-20999", None),
        ({"transfer": {"connector": "lmcache-mp"}}, "20000-20999", None),
        ({"transfer": {"backends": ["UCX", "GDS"]}}, "20000-20999", None),
        ({"transfer": {"backends": ["UCX"]}}, "20000-20999", "5600_20000-20999"),
        ({"transfer": {"extraConfig": {"backends": ["LIBFABRIC"]}}}, "20000-20999", None),
        (TORCH, None, "5600"),
        # KV that moves through a store alone needs no port of an engine.
        ({**TORCH, "transfer": STORED}, None, "none"),
        ({"transfer": STORED}, "20000-20999", "none"),
        ({"transfer": {**STORED, "connector": "nixl"}}, "20000-20999", "5600_20000-20999"),
    ],
)  # fmt: skip
def test_both_sides_of_a_hand_off(
    spec: dict[str, Any], variable: str | None, label: str | None
) -> None:
    [pool_set] = pair(spec, {"accelerator": spec["accelerator"]} if "accelerator" in spec else {})
    assert {ports_of(pod) for pod in pods(pool_set)} == {(variable, label)}


def test_ports_of_pods_of_an_earlier_operator_are_known() -> None:
    """It labelled pods of the reference engine with their side channel, which they do not open."""
    [torch] = pair({**TORCH, "transfer": STORED}, {"accelerator": TORCH["accelerator"]})
    [vllm] = pair({"transfer": STORED})
    earlier = HandoffPorts(5600, None)
    assert {earlier_handoff_ports(pool) for pool in torch.pools} == {earlier}
    assert {earlier_handoff_ports(pool) for pool in vllm.pools} == {None}


def test_the_users_variable_wins_and_its_ports_are_not_known() -> None:
    env = {"engine": {"env": [{"name": VARIABLE, "value": "1024-1099"}]}}
    [pool_set] = pair(env)
    prefill, *decodes = map(ports_of, pods(pool_set))
    assert prefill == ("1024-1099", None)
    assert set(decodes) == {("20000-20999", "5600_20000-20999")}


def test_a_pool_without_a_peer_has_none() -> None:
    [pool_set] = parse_pools(documents(*unified_pool()))
    assert [ports_of(pod) for pod in pods(pool_set)] == [(None, None)]
