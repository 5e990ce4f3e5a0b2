"""Parsing pods of the operator, and of users, as pods to check."""

from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_doctor.cluster_pods import has_engine, is_epp, target_epp, target_pod
from tandem_doctor.gather import TargetPod, handoff_address
from tandem_doctor.pod_http import Get
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair

IP = "10.1.2.3"


def targets(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> tuple[TargetPod, TargetPod, list[str]]:
    """The first prefill pod, the first decode pod, and the addresses of their endpoints."""
    addresses: list[str] = []

    def make_get(pod: str, address: HostPort) -> Get:
        addresses.append(str(address))

        async def get(_path: str) -> bytes:
            raise NotImplementedError

        return get

    running = [started(pod) for pod in pods(pair(prefill, decode)[0])[:2]]
    prefill_target, decode_target = (target_pod(pod, make_get, inside=True) for pod in running)
    return prefill_target, decode_target, addresses


def started(pod: dict[str, Any]) -> dict[str, Any]:
    metadata = {**pod["metadata"], "uid": "u-1"}
    return {**pod, "metadata": metadata, "status": {"phase": "Running", "podIP": IP}}


def test_pods_of_the_operator_are_parsed_with_their_engine_commands() -> None:
    prefill, decode, addresses = targets(
        {
            "engine": {"dtype": "bfloat16"},
            "parallelism": {"tensor": 2},
            "accelerator": {"count": 2},
        },
        {},
    )
    assert addresses == [f"{IP}:8000", f"{IP}:8200", f"{IP}:8001"]
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.group == decode.group == "org-model"
    assert prefill.compat == decode.compat != ""
    assert prefill.get_sidecar is None
    assert decode.get_sidecar is not None
    for target in (prefill, decode):
        assert target.command is not None
        assert target.command.flags["model"] == "org/model"
        assert target.command.flags["dtype"] == "bfloat16"
        assert target.command.kv_transfer_config["engine_id"] == f"{target.pod}-u-1"
        assert target.command.kv_transfer_config["kv_load_failure_policy"] == "recompute"
        assert handoff_address(target.command, target.role, IP) == HostPort(IP, 5600)
    assert prefill.command is not None
    assert prefill.command.flags["tensor-parallel-size"] == "2"
    assert prefill.command.environment["UCX_TLS"] == "all"


@pytest.mark.parametrize(
    ("transfer", "addresses"),
    [
        ({"sideChannelPort": 5700}, (HostPort(IP, 5700), HostPort(IP, 5700))),
        ({"connector": "mooncake"}, (HostPort(IP, 8998), None)),
        ({"connector": "offloading"}, (None, None)),
        (
            {
                "connector": "multi",
                "connectors": [{"connector": "nixl"}, {"connector": "offloading"}],
            },
            (HostPort(IP, 5600), HostPort(IP, 5600)),
        ),
    ],
)
def test_a_handoff_begins_at_the_connectors_port(
    transfer: dict[str, Any], addresses: tuple[HostPort | None, HostPort | None]
) -> None:
    prefill, decode, _ = targets({"transfer": transfer}, {})
    handoff_addresses = [
        handoff_address(target.command, target.role, target.address.host)
        for target in (prefill, decode)
        if target.command is not None
    ]
    assert tuple(handoff_addresses) == addresses


def test_pods_of_users_need_only_a_role_label() -> None:
    def pod(role: str, annotations: dict[str, str]) -> dict[str, Any]:
        metadata = {"name": "x", "labels": {labels.ROLE: role}, "annotations": annotations}
        return started({"metadata": metadata, "spec": {"containers": [{"name": "c"}]}})

    addresses: list[str] = []

    def make_get(_pod: str, address: HostPort) -> Get:
        addresses.append(str(address))

        async def get(_path: str) -> bytes:
            raise NotImplementedError

        return get

    target = target_pod(pod("prefill", {labels.TARGET_PORT: "9000"}), make_get, inside=False)
    assert (target.group, target.compat, target.command, target.is_reachable) == (
        "",
        "",
        None,
        False,
    )
    assert addresses == [f"{IP}:9000"]
    assert has_engine(pod("decode", {}))
    assert not has_engine(pod("trainer", {}))
    assert not has_engine({"metadata": {"name": "y"}})


def test_an_epp_is_known_by_its_ports() -> None:
    def listening(*ports: int) -> dict[str, Any]:
        container = {"name": "any", "ports": [{"containerPort": port} for port in ports]}
        return {"metadata": {"name": "chat-epp"}, "spec": {"containers": [container]}}

    addresses: list[str] = []

    def make_get(pod: str, address: HostPort) -> Get:
        addresses.append(f"{pod} {address}")

        async def get(_path: str) -> bytes:
            raise NotImplementedError

        return get

    assert is_epp(listening(9002, 9003, 9090))
    assert is_epp(listening(8080, 9005, 9090))
    assert not is_epp(listening(9090))
    name, _ = target_epp(started(listening(9002, 9090)), make_get)
    assert name == "chat-epp"
    assert addresses == [f"chat-epp {IP}:9090"]
