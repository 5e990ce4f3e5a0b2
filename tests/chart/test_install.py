"""The chart on a real API server: valid, admitted, and uninstalled except for the CRDs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane

from . import programs
from .programs import CHART, MONITORING, RELEASE

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("helm")]

HERE = Path(__file__).parent
NOT_SERVED = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, which this cluster lacks."""


@pytest.mark.parametrize("case", ["default", "namespaced", "ha", "monitoring"])
def test_strictly_valid(control_plane: ControlPlane, namespace: str, case: str) -> None:
    manifests = programs.objects(
        *("--values", HERE / "values" / f"{case}.yaml", "--namespace", namespace),
        apis=[MONITORING],
    )
    served = [manifest for manifest in manifests if manifest["kind"] not in NOT_SERVED]
    for manifest in served:
        # Users create the namespaces to watch; a server-side dry run needs them to exist.
        if manifest["metadata"].get("namespace", "").startswith("team-"):
            manifest["metadata"]["namespace"] = namespace
    # A pod is not admitted before its service account exists.
    [account] = {m["spec"]["serviceAccountName"] for m in served if m["kind"] == "Pod"}
    control_plane.kubectl(*("create", "serviceaccount", account, f"--namespace={namespace}"))
    control_plane.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server"),
        *("--validate=strict", "--filename=-"),
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": served}),
    )


@pytest.fixture
def restricted(control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """A namespace that enforces restricted pod security; the release is uninstalled afterwards."""
    control_plane.kubectl(
        *("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    )
    yield namespace
    programs.helm(
        *("uninstall", RELEASE, "--namespace", namespace, "--ignore-not-found"),
        kubeconfig=control_plane.kubeconfig,
    )


def test_installs_upgrades_and_leaves_only_crds(
    control_plane: ControlPlane, restricted: str
) -> None:
    def helm(*arguments: str) -> str:
        return programs.helm(
            *arguments, "--namespace", restricted, kubeconfig=control_plane.kubeconfig
        )

    # The CRDs may exist already, because tests share the control plane.
    output = helm("install", RELEASE, str(CHART), "--take-ownership")
    assert f"deployment/{RELEASE}" in output
    # Pods that exist were admitted by the namespace's pod security.
    control_plane.kubectl(
        *("wait", f"deployment/{RELEASE}", "--for=jsonpath={.status.replicas}=1"),
        *(f"--namespace={restricted}", "--timeout=60s"),
    )
    helm("upgrade", RELEASE, str(CHART), "--set", "operator.replicas=2")
    labelled = f"--selector=app.kubernetes.io/instance={RELEASE}"
    assert "PodDisruptionBudget" in _kinds(control_plane, labelled)

    output = helm("uninstall", RELEASE)
    assert "prefillpools.tandem.dev" in output
    control_plane.kubectl(
        *("wait", "--for=delete", "deployment", labelled, f"--namespace={restricted}")
    )
    assert _kinds(control_plane, labelled) == set()
    crds = json.loads(control_plane.kubectl("get", "crd", "--output=json"))["items"]
    ours = {crd["metadata"]["name"] for crd in crds if crd["spec"]["group"] == "tandem.dev"}
    assert ours == {"prefillpools.tandem.dev", "decodepools.tandem.dev"}


def _kinds(control_plane: ControlPlane, selector: str) -> set[str]:
    """Kinds of all objects with the label, except pods and objects that controllers create."""
    names = control_plane.kubectl("api-resources", "--verbs=list", "--output=name").split()
    passing = {"pods", "replicasets.apps", "endpoints", "endpointslices.discovery.k8s.io"}
    resources = ",".join(sorted(set(names) - passing - {"componentstatuses"}))
    objects: list[dict[str, Any]] = json.loads(
        control_plane.kubectl("get", resources, "--all-namespaces", selector, "--output=json")
    )["items"]
    return {item["kind"] for item in objects}
