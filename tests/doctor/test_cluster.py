"""Pods as the operator makes them, and as users do, read as places to look at."""

from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_doctor.cluster import has_engine, place_of
from tandem_doctor.gather import Ask, Place, hand_off_address
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair

IP = "10.1.2.3"


def places(prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Place, Place, list[str]]:
    """Of the first prefill and the first decode pod, and whom they would ask."""
    asked: list[str] = []

    def asking(pod: str, address: HostPort) -> Ask:
        asked.append(str(address))

        async def ask(_path: str) -> bytes:
            raise NotImplementedError

        return ask

    made = [started(pod) for pod in pods(pair(prefill, decode)[0])[:2]]
    one, other = (place_of(pod, asking, inside=True) for pod in made)
    return one, other, asked


def started(pod: dict[str, Any]) -> dict[str, Any]:
    metadata = {**pod["metadata"], "uid": "u-1"}
    return {**pod, "metadata": metadata, "status": {"phase": "Running", "podIP": IP}}


def test_the_operators_pods_are_read_as_their_engines_start() -> None:
    prefill, decode, asked = places(
        {
            "engine": {"dtype": "bfloat16"},
            "parallelism": {"tensor": 2},
            "accelerator": {"count": 2},
        },
        {},
    )
    assert asked == [f"{IP}:8000", f"{IP}:8200", f"{IP}:8001"]
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.group == decode.group == "org-model"
    assert prefill.compat == decode.compat != ""
    assert prefill.ask_sidecar is None
    assert decode.ask_sidecar is not None
    for place in (prefill, decode):
        assert place.declared is not None
        assert place.declared.flags["model"] == "org/model"
        assert place.declared.flags["dtype"] == "bfloat16"
        assert place.declared.transfer["engine_id"] == f"{place.pod}-u-1"
        assert place.declared.transfer["kv_load_failure_policy"] == "recompute"
        assert hand_off_address(place.declared, place.role, IP) == HostPort(IP, 5600)
    assert prefill.declared is not None
    assert prefill.declared.flags["tensor-parallel-size"] == "2"
    assert prefill.declared.environment["UCX_TLS"] == "all"


@pytest.mark.parametrize(
    ("transfer", "where"),
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
def test_a_hand_off_begins_where_the_connector_listens(
    transfer: dict[str, Any], where: tuple[HostPort | None, HostPort | None]
) -> None:
    prefill, decode, _ = places({"transfer": transfer}, {})
    found = [
        hand_off_address(place.declared, place.role, place.address.host)
        for place in (prefill, decode)
        if place.declared is not None
    ]
    assert tuple(found) == where


def test_pods_of_users_need_no_more_than_a_role() -> None:
    def pod(role: str, annotations: dict[str, str]) -> dict[str, Any]:
        metadata = {"name": "x", "labels": {labels.ROLE: role}, "annotations": annotations}
        return started({"metadata": metadata, "spec": {"containers": [{"name": "c"}]}})

    seen: list[str] = []

    def asking(_pod: str, address: HostPort) -> Ask:
        seen.append(str(address))

        async def ask(_path: str) -> bytes:
            raise NotImplementedError

        return ask

    own = place_of(pod("prefill", {labels.TARGET_PORT: "9000"}), asking, inside=False)
    assert (own.group, own.compat, own.declared, own.reaches) == ("", "", None, False)
    assert seen == [f"{IP}:9000"]
    assert has_engine(pod("decode", {}))
    assert not has_engine(pod("trainer", {}))
    assert not has_engine({"metadata": {"name": "y"}})
