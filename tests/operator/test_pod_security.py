"""Every pod Tandem renders, on a real API server that enforces the restricted profile."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem_contract.documents import load_documents
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.resolve import Defaults
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings

from ..cluster.control_plane import ControlPlane
from ..cluster.kubectl import Failed
from .endpoints import endpoint
from .pool_yaml import pair
from .test_engines import CASES
from .test_probes import CHECKS

pytestmark = pytest.mark.control_plane

HERE = Path(__file__).parent
TINY: tuple[dict[str, Any], dict[str, Any]] = (
    {"model": {"name": "tiny", "source": {"tiny": {}}}, "engine": {"type": "torch"},
     "accelerator": {}, "placement": {"topologyKey": "topology.kubernetes.io/zone"}},
    {"accelerator": {}, "routing": {"epp": {"enabled": False}}},
)  # fmt: skip
CHECKED: tuple[dict[str, Any], dict[str, Any]] = (
    {"healthChecks": CHECKS}, {"healthChecks": CHECKS}
)  # fmt: skip
"""The API server has rules for probes, too."""


@pytest.fixture
def restricted(control_plane: ControlPlane, namespace: str) -> str:
    label = "pod-security.kubernetes.io/enforce=restricted"
    control_plane.kubectl("label", "namespace", namespace, label)
    return namespace


def _create(control_plane: ControlPlane, namespace: str, bodies: list[dict[str, Any]]) -> None:
    for pod in bodies:
        pod["metadata"]["namespace"] = namespace
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    control_plane.kubectl(
        *("create", "--dry-run=server", "--validate=strict", "--filename=-"), input=listed
    )


RDMA = {
    name for name, specs in CASES.items() if any("rdma" in s.get("transfer", {}) for s in specs)
}


@pytest.mark.parametrize("assigned_users", [False, True])
def test_the_restricted_profile_admits_every_pod(
    control_plane: ControlPlane, restricted: str, assigned_users: bool
) -> None:
    defaults = Defaults(assigned_users=assigned_users)
    bodies = []
    cases = [specs for name, specs in CASES.items() if name not in RDMA]
    for i, (prefill, decode) in enumerate((*cases, TINY, CHECKED)):
        for pod in pods(pair(prefill, decode)[0], defaults):
            pod["metadata"]["name"] += f"-{i}"
            bodies.append(pod)
    (golden,) = parse_pools(load_documents(HERE / "golden" / "vllm.yaml"))
    _create(control_plane, restricted, [*bodies, *pods(golden, defaults)])


def test_pods_with_rdma_are_an_exception_because_they_lock_memory(
    control_plane: ControlPlane, restricted: str
) -> None:
    assert RDMA
    for name in RDMA:
        with pytest.raises(Failed, match="IPC_LOCK"):
            _create(control_plane, restricted, pods(pair(*CASES[name])[0]))


def test_where_users_are_assigned_no_pod_names_one() -> None:
    """OpenShift's restricted-v2 refuses user and group ids outside the namespace's range."""
    assigned, fixed = (
        [
            *(pod for specs in CASES.values() for pod in pods(pair(*specs)[0], defaults)),
            *plan_endpoint(endpoint(), settings).apply,
        ]
        for defaults, settings in (
            (Defaults(assigned_users=True), RouterSettings(assigned_users=True)),
            (Defaults(), RouterSettings()),
        )
    )
    assert _named(assigned) & IDS == set()
    assert _named(fixed) >= IDS


IDS = {"runAsUser", "runAsGroup", "fsGroup"}


def _named(value: Any) -> set[str]:
    """The names of all fields in a JSON value."""
    if isinstance(value, Mapping):
        return set(value).union(*map(_named, value.values()))
    return set().union(*map(_named, value)) if isinstance(value, list | tuple) else set()


def test_a_host_path_model_is_the_exception(control_plane: ControlPlane, restricted: str) -> None:
    source = {"name": "m", "source": {"path": "/models/m"}}
    with pytest.raises(Failed, match="hostPath"):
        _create(control_plane, restricted, pods(pair({"model": source})[0]))
