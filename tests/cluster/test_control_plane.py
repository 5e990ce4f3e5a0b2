"""The control plane that other tests stand on."""

import json
from pathlib import Path

import pytest

from . import kubectl
from .control_plane import ControlPlane

pytestmark = pytest.mark.control_plane


def test_takes_objects_and_writes_them_to_the_audit_log(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("create", "configmap", "seen", f"--namespace={namespace}")
    events = [json.loads(line) for line in control_plane.audit_log.read_text().splitlines()]
    written = [
        (event["verb"], event["objectRef"]["name"], event["stage"])
        for event in events
        if event.get("objectRef", {}).get("namespace") == namespace
        and event["objectRef"]["resource"] == "configmaps"
        and event["user"]["username"] == "admin"
    ]
    assert written == [("create", "seen", "ResponseComplete")]


def test_decides_by_rbac(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("create", "serviceaccount", "reader", f"--namespace={namespace}")
    as_account = control_plane.kubeconfig_for_service_account(namespace, "reader")
    with pytest.raises(kubectl.Failed, match="forbidden"):
        kubectl.run(as_account, "get", "pods", f"--namespace={namespace}")
    control_plane.kubectl(
        *("create", "rolebinding", "reader", "--clusterrole=view"),
        *(f"--serviceaccount={namespace}:reader", f"--namespace={namespace}"),
    )
    assert kubectl.run(as_account, "get", "pods", f"--namespace={namespace}") == ""


def test_knows_users_by_certificate(control_plane: ControlPlane) -> None:
    kubeconfig = control_plane.kubeconfig_for("jane", groups=("team",))
    review = json.loads(kubectl.run(kubeconfig, "auth", "whoami", "--output=json"))
    assert review["status"]["userInfo"]["username"] == "jane"
    assert "team" in review["status"]["userInfo"]["groups"]


def test_collects_what_a_custom_resource_owned(crds: ControlPlane, namespace: str) -> None:
    pool = {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "PrefillPool",
        "metadata": {"name": "owner", "namespace": namespace},
        "spec": {"model": {"name": "m"}, "accelerator": {"count": 1}},
    }
    owner = json.loads(
        crds.kubectl("create", "--filename=-", "--output=json", input=json.dumps(pool))
    )
    owned = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "owned",
            "namespace": namespace,
            "ownerReferences": [
                {
                    "apiVersion": pool["apiVersion"],
                    "kind": pool["kind"],
                    "name": "owner",
                    "uid": owner["metadata"]["uid"],
                }
            ],
        },
    }
    crds.kubectl("create", "--filename=-", input=json.dumps(owned))
    crds.kubectl("delete", "prefillpool", "owner", f"--namespace={namespace}")
    crds.kubectl(
        *("wait", "--for=delete", "configmap/owned"), f"--namespace={namespace}", "--timeout=25s"
    )


@pytest.mark.usefixtures("control_plane_programs")
def test_leaves_no_process(tmp_path: Path) -> None:
    with ControlPlane.running(tmp_path):
        names = {Path(argv[0]).name for argv in _processes_of(tmp_path)}
        assert names == {"etcd", "kube-apiserver", "kube-controller-manager"}
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[list[str]]:
    """The command lines that name `folder`."""
    commands = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if any(str(folder) in argument for argument in line):
            commands.append(line)
    return commands
