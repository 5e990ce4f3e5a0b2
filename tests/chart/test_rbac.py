"""RBAC rules of the chart against a run of the operator: none denied, none unused."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tandem_contract import labels
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Failed

from . import programs
from .programs import CHART, RELEASE

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("helm", "crds")]

ROOT = Path(__file__).parents[2]
_SECONDS = 90

Grant = tuple[str, str, str]
"""API group, resource (with subresource), verb."""

GATEWAY = {
    "inference.networking.k8s.io/inferencepools",
    "inference.networking.x-k8s.io/inferencepools",
    "gateway.networking.k8s.io/httproutes",
}
"""Kinds that this cluster lacks."""
HANDED_ON = {
    f"{group}/{kind}"
    for group in ("llm-d.ai", "inference.networking.x-k8s.io")
    for kind in ("inferencemodelrewrites", "inferenceobjectives")
}
"""What the operator lets EPPs read, and may only do as it holds these rights itself."""
RARE = {
    # Used only in rare cases that this run does not have: reading an object after a conflicting
    # create, adopting an orphan, deleting a revision once five newer ones exist.
    ("", "pods", "get"),
    ("apps", "controllerrevisions", "get"),
    ("batch", "jobs", "get"),
    ("apps", "controllerrevisions", "patch"),
    ("apps", "controllerrevisions", "delete"),
    # Asked by the admission of owner references that block a deletion, not by a request.
    ("tandem.dev", "prefillpools/finalizers", "update"),
    ("tandem.dev", "decodepools/finalizers", "update"),
}
USERS = "rbac.authorization.k8s.io/aggregate-to-"
"""Label prefix of ClusterRoles for users; the operator has none of them."""


def test_cluster_wide(control_plane: ControlPlane, namespace: str) -> None:
    with _run(control_plane, namespace, "--all-namespaces"):
        _exercise_operator(control_plane, namespace)
    used, denied = _audited_grants(control_plane, namespace)
    assert denied == set()
    granted = set(_granted(programs.objects("--set", "crds.install=false")))
    needless = GATEWAY | HANDED_ON
    idle = {grant for grant in granted if f"{grant[0]}/{grant[1]}" not in needless} - used
    assert idle == RARE


def test_in_a_namespace(control_plane: ControlPlane, namespace: str) -> None:
    with _run(
        *(control_plane, namespace, f"--namespace={namespace}"),
        values=("--set", f"watchNamespaces={{{namespace}}}"),
    ):
        _exercise_operator(control_plane, namespace)
    _, denied = _audited_grants(control_plane, namespace)
    # The operator asks once at start and works without it.
    assert denied == {
        ("", "nodes", "list"),
        ("apiextensions.k8s.io", "customresourcedefinitions", "get"),
    }


@contextmanager
def _run(
    control_plane: ControlPlane, namespace: str, scope: str, values: tuple[str, ...] = ()
) -> Iterator[None]:
    """Run the operator with the chart's ServiceAccount."""
    programs.helm(
        *("install", RELEASE, str(CHART), "--namespace", namespace, *values),
        *("--set", "crds.install=false", "--set", "operator.replicas=0"),
        kubeconfig=control_plane.kubeconfig,
    )
    kubeconfig = control_plane.kubeconfig_for_service_account(namespace, RELEASE)
    settings = control_plane.kubectl(
        *("get", "configmap", f"{RELEASE}-router", f"--namespace={namespace}"),
        "--output=jsonpath={.data.router\\.yaml}",
    )
    router_settings = kubeconfig.with_suffix(".router.yaml")
    router_settings.write_text(settings)
    operator = subprocess.Popen(
        [
            *(sys.executable, "-m", "tandem_operator.main", scope, f"--kubeconfig={kubeconfig}"),
            *("--health=127.0.0.1:0", "--metrics=127.0.0.1:0", f"--lease-namespace={namespace}"),
            f"--router-settings={router_settings}",
        ],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield
        assert operator.poll() is None, "the operator exited"
    finally:
        operator.terminate()
        operator.wait()
        programs.helm(
            *("uninstall", RELEASE, "--namespace", namespace), kubeconfig=control_plane.kubeconfig
        )


def _exercise_operator(control_plane: ControlPlane, namespace: str) -> None:
    """Create a pair of pools, leave the number of pods to the operator, scale it to zero, move pods
    to another endpoint, delete all."""

    def kubectl(*arguments: str) -> str:
        return control_plane.kubectl(*arguments, f"--namespace={namespace}")

    def read(version: str, resource: str) -> Any:
        return _read(control_plane, namespace, version, resource)

    def pods(label: str = labels.POOL) -> int:
        return len(read("v1", f"pods?labelSelector={quote(label)}")["items"])

    kubectl("apply", f"--filename={ROOT / 'examples/quickstart.yaml'}")
    _until(lambda: pods() == 3, "three pods")
    kubectl("wait", "--for=create", "deployment/quickstart-envoy", f"--timeout={_SECONDS}s")
    kubectl("wait", "--for=create", "deployment/quickstart-epp", f"--timeout={_SECONDS}s")
    pool = json.dumps({"spec": {"routing": {"inferencePool": {"enabled": True}}}})
    kubectl("patch", "decodepool/quickstart", "--type=merge", f"--patch={pool}")
    role = "rbac.authorization.k8s.io/v1", "roles/quickstart-epp"
    _until(lambda: "inferenceobjectives" in str(read(*role)), "the EPP's right to read objectives")
    removal = json.dumps({"spec": {"replicas": None}})
    for kind, name, number in (
        ("prefillpool", "quickstart-prefill", 1),
        ("decodepool", "quickstart", 2),
    ):
        kubectl("patch", f"{kind}/{name}", "--type=merge", f"--patch={removal}")
        pool = labels.API_VERSION, f"{kind}s/{name}"
        _until(
            lambda pool=pool, number=number: read(*pool)["spec"].get("replicas") == number,
            f"the number of {name}",
        )
    kubectl("scale", "decodepool/quickstart", "--replicas=0")
    _until(lambda: pods() == 1, "the decode pods to be gone")
    # The prefill pod stays and gets the label of the other endpoint; the first endpoint goes.
    moved = {"spec": {"routing": {"endpoint": "other", "epp": {"enabled": False}}}}
    kubectl("patch", "decodepool/quickstart", "--type=merge", f"--patch={json.dumps(moved)}")
    kubectl("wait", "--for=create", "deployment/other-envoy", f"--timeout={_SECONDS}s")
    for deleted in ("deployment/quickstart-envoy", "deployment/quickstart-epp"):
        kubectl("wait", "--for=delete", deleted, f"--timeout={_SECONDS}s")
    _until(lambda: pods(labels.endpoint_label("other")) == 1, "the prefill pod's label")
    # Its addresses and keys go ten minutes after the time that the operator has written down.
    service = ("service", "quickstart")
    _until(lambda: labels.UNUSED_SINCE in str(read("v1", "services/quickstart")), "the time")
    kubectl("annotate", *service, "--overwrite", f"{labels.UNUSED_SINCE}=2026-01-31T10:00:00Z")
    for deleted in ("secret/quickstart-plan-keys", "service/quickstart"):
        kubectl("wait", "--for=delete", deleted, f"--timeout={_SECONDS}s")
    kubectl("delete", "decodepools,prefillpools", "--all")
    _until(lambda: pods() == 0, "the pods to be collected")
    _exercise_pull(control_plane, namespace)


def _exercise_pull(control_plane: ControlPlane, namespace: str) -> None:
    """Download a model before its pods, then do without."""
    cache = {"claimName": "hub", "prePull": True}
    pool = {
        "apiVersion": labels.API_VERSION,
        "kind": "PrefillPool",
        "metadata": {"name": "pulling", "namespace": namespace},
        "spec": {"model": {"name": "org/model", "cache": cache}},
    }

    def kubectl(*arguments: str, body: str = "") -> str:
        return control_plane.kubectl(*arguments, f"--namespace={namespace}", input=body or None)

    def jobs() -> int:
        selected = f"jobs?labelSelector={quote(labels.MODEL_PULL)}"
        return len(_read(control_plane, namespace, "batch/v1", selected)["items"])

    kubectl("apply", "--filename=-", body=json.dumps(pool))
    _until(lambda: jobs() == 1, "the Job")
    off = {"spec": {"model": {"cache": {"prePull": False}}}}
    kubectl("patch", "prefillpool/pulling", "--type=merge", f"--patch={json.dumps(off)}")
    _until(lambda: jobs() == 0, "the Job to be deleted")
    kubectl("delete", "prefillpool/pulling")


def _read(control_plane: ControlPlane, namespace: str, version: str, resource: str) -> Any:
    """What the namespace has. For polls: kubectl takes ten times as much CPU time."""
    group = "api" if version == "v1" else "apis"
    return control_plane.request("GET", f"/{group}/{version}/namespaces/{namespace}/{resource}")


def _until(holds: Callable[[], bool], event: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited {_SECONDS} s for {event}"
        time.sleep(0.1)


def _audited_grants(control_plane: ControlPlane, namespace: str) -> tuple[set[Grant], set[Grant]]:
    """Requests of the operator's account in the audit log: allowed, and denied."""
    user = f"system:serviceaccount:{namespace}:{RELEASE}"
    used, denied = set[Grant](), set[Grant]()
    for line in control_plane.audit_log.read_text().splitlines():
        event = json.loads(line)
        ref = event.get("objectRef", {})
        if event["user"]["username"] != user or "resource" not in ref:
            continue
        resource = "/".join(filter(None, (ref["resource"], ref.get("subresource"))))
        code = event.get("responseStatus", {}).get("code", 200)
        verbs = {event["verb"]}
        if event["verb"] == "patch" and code == 201:
            verbs.add("create")
        grants = {(ref.get("apiGroup", ""), resource, verb) for verb in verbs}
        if code != 403:
            used |= grants
        elif _lacks_a_right(event):
            denied |= grants
    return used, denied


def _lacks_a_right(event: dict[str, Any]) -> bool:
    """Whether a request got 403 for want of a right. Admission answers with it, too, for instance
    while it has not seen a new kind or the account of a new namespace; the operator tries again."""
    decision = event.get("annotations", {}).get("authorization.k8s.io/decision")
    owner = "blockOwnerDeletion" in (message := event["responseStatus"].get("message", ""))
    return decision == "forbid" or (owner and "can't set finalizers" in message)


def _is_for_users(role: dict[str, Any]) -> bool:
    return any(label.startswith(USERS) for label in role["metadata"]["labels"])


def test_no_role_lists_secrets() -> None:
    reading = {"list", "watch", "*", "deletecollection"}
    for values in ((), ("--set", "watchNamespaces={team-a}")):
        for role in programs.objects("--set", "crds.install=false", *values):
            for rule in role.get("rules", ()):
                if {"secrets", "*"} & set(rule["resources"]):
                    assert not reading & set(rule["verbs"]), role["metadata"]["name"]


def test_users_roles_extend_the_clusters_own(control_plane: ControlPlane, namespace: str) -> None:
    roles = [
        role
        for role in programs.objects("--set", "crds.install=false", "--namespace", namespace)
        if role["kind"] == "ClusterRole" and _is_for_users(role)
    ]
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": roles})
    control_plane.kubectl("create", "--filename=-", input=items)
    try:
        for role in ("view", "edit", "admin"):
            control_plane.kubectl(
                *("create", "rolebinding", f"user-{role}", f"--clusterrole={role}"),
                *(f"--user=user-{role}", f"--namespace={namespace}"),
            )

        def may(user: str, verb: str, resource: str) -> bool:
            kind, _, subresource = resource.partition("/")
            question = (
                *("auth", "can-i", verb, kind, f"--subresource={subresource}"),
                *(f"--as={user}", f"--namespace={namespace}"),
            )
            try:
                return control_plane.kubectl(*question).strip() == "yes"
            except Failed:
                return False  # kubectl's exit status of "no" is 1

        # The controller manager adds the rules.
        _until(lambda: may("user-edit", "create", "decodepools.tandem.dev"), "rights to edit")
        _until(lambda: may("user-view", "get", "decodepools.tandem.dev"), "rights to view")
        _until(lambda: may("user-admin", "delete", "prefillpools.tandem.dev"), "rights of admins")
        assert may("user-edit", "patch", "prefillpools.tandem.dev/scale")
        for verb, resource in (
            ("create", "decodepools.tandem.dev"),
            ("patch", "prefillpools.tandem.dev/scale"),
        ):
            assert not may("user-view", verb, resource)
        assert not may("user-edit", "patch", "decodepools.tandem.dev/status")
        assert not may("nobody", "get", "decodepools.tandem.dev")
    finally:
        control_plane.kubectl("delete", "--filename=-", input=items)


def _granted(manifests: list[dict[str, Any]]) -> Iterator[Grant]:
    for role in manifests:
        if role["kind"] not in ("Role", "ClusterRole") or _is_for_users(role):
            continue
        for rule in role["rules"]:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    yield from ((group, resource, verb) for verb in rule["verbs"])
