"""Every pod Tandem renders, on a real API server that enforces the restricted profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem_contract.documents import load_documents
from tandem_operator.pods.manifests import pods
from tandem_operator.resources.pool_files import parse_pools

from ..cluster.control_plane import ControlPlane
from ..cluster.kubectl import Failed
from .pool_yaml import pair
from .test_engines import CASES

pytestmark = pytest.mark.control_plane

HERE = Path(__file__).parent
TINY: tuple[dict[str, Any], dict[str, Any]] = (
    {"model": {"name": "tiny", "source": {"tiny": {}}}, "engine": {"type": "torch"},
     "accelerator": {}, "placement": {"topologyKey": "topology.kubernetes.io/zone"}},
    {"accelerator": {}, "routing": {"epp": {"enabled": False}}},
)  # fmt: skip


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


def test_the_restricted_profile_admits_every_pod(
    control_plane: ControlPlane, restricted: str
) -> None:
    bodies = []
    for i, (prefill, decode) in enumerate((*CASES.values(), TINY)):
        for pod in pods(pair(prefill, decode)[0]):
            pod["metadata"]["name"] += f"-{i}"
            bodies.append(pod)
    (golden,) = parse_pools(load_documents(HERE / "golden" / "vllm.yaml"))
    _create(control_plane, restricted, [*bodies, *pods(golden)])


def test_a_host_path_model_is_the_exception(control_plane: ControlPlane, restricted: str) -> None:
    source = {"name": "m", "source": {"path": "/models/m"}}
    with pytest.raises(Failed, match="hostPath"):
        _create(control_plane, restricted, pods(pair({"model": source})[0]))
