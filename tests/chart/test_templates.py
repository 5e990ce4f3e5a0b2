"""The chart's manifests: against golden files, and what values must and must not do.

TANDEM_GOLDEN=write .venv/bin/python -m pytest tests/chart/test_templates.py    writes them anew
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tandem_operator.routing.endpoint.settings import RouterSettings, load_router_settings

from . import programs
from .programs import CHART, MONITORING, Refused, documents, kinds, objects, template

pytestmark = [pytest.mark.component, pytest.mark.usefixtures("helm")]

HERE = Path(__file__).parent
CASES = ("default", "namespaced", "ha", "monitoring")
OPENSHIFT = "security.openshift.io/v1"
CLUSTER_SCOPED = ("Cluster", "ValidatingAdmission")
"""How kinds without a namespace begin, but for the CRDs."""
HIDDEN = "…"
"""Placeholder for files that the chart copies unchanged; other tests check those, the CRDs and the
policy for pools."""


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    manifests = template(
        *("--values", HERE / "values" / f"{case}.yaml"),
        *("--set", "crds.install=false", "--set", "poolPolicy=None"),
        apis=[MONITORING] if case == "monitoring" else [],
    )
    for copied in ("dashboards/tandem.json", "rules/tandem.yaml", "check.py"):
        manifests = _without((CHART / "files" / copied).read_text(), manifests)
    golden = HERE / "golden" / f"{case}.yaml"
    if os.environ.get("TANDEM_GOLDEN") == "write":
        golden.write_text(manifests)
    assert manifests == golden.read_text(), f"see this module's docstring: {golden}"


def _without(text: str, manifests: str) -> str:
    """`made` with a copy of `text`, indented or as one quoted string, hidden."""
    for indent in ("  ", "    "):
        copy = "\n".join(f"{indent}{line}".rstrip() for line in text.splitlines())
        manifests = manifests.replace(copy, indent + HIDDEN)
    lines = [f'    - "{HIDDEN}"' if line.startswith('    - "\\"') else line
             for line in manifests.splitlines()]  # fmt: skip
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_lint(case: str) -> None:
    programs.helm("lint", "--strict", CHART, "--values", HERE / "values" / f"{case}.yaml")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("operator.replica=2", "replica"),
        ("watchNamespace={a}", "watchNamespace"),
        ("operator.logLevel=verbose", "logLevel"),
        ("operator.replicas=two", "replicas"),
        ("monitoring.podMonitors.label.a=b", "label"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
        ("router.envoy.replica=2", "replica"),
        ("router.epp.replicas=0", "replicas"),
        ("networkPolicy.prometheusNamespace=x", "prometheusNamespace"),
        ("networkPolicy.controlPlaneCIDRs={10.0.0.1}", "controlPlaneCIDRs"),
        ("poolPolicy=Audit", "poolPolicy"),
    ],
)
def test_refuses_values(value: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        template("--set", value)


def test_installs_crds_as_they_are_and_keeps_them() -> None:
    crds = [manifest for manifest in objects() if manifest["kind"] == "CustomResourceDefinition"]
    assert {crd["metadata"]["name"] for crd in crds} == {
        "prefillpools.tandem.dev",
        "decodepools.tandem.dev",
    }
    for crd in crds:
        file = CHART.parents[1] / "crds" / f"{crd['spec']['names']['plural']}.yaml"
        [source] = documents(file.read_text())
        annotations = source["metadata"].setdefault("annotations", {})
        annotations["helm.sh/resource-policy"] = "keep"
        assert crd == source


def test_crds_may_be_left_out_or_not_kept() -> None:
    assert "CustomResourceDefinition" not in kinds(objects("--set", "crds.install=false"))
    crds = [
        manifest
        for manifest in objects("--set", "crds.keep=false")
        if manifest["kind"] == "CustomResourceDefinition"
    ]
    assert len(crds) == 2
    assert not any(
        "helm.sh/resource-policy" in crd["metadata"].get("annotations", {}) for crd in crds
    )


def test_namespaced_mode_has_no_cluster_scoped_objects() -> None:
    manifests = objects("--set", "watchNamespaces={team-a}", "--set", "crds.install=false")
    assert not {kind for kind in kinds(manifests) if kind.startswith(CLUSTER_SCOPED)}
    roles = {
        (role["metadata"]["namespace"], role["metadata"]["name"])
        for role in manifests
        if role["kind"] == "Role"
    }
    assert roles == {("team-a", "tandem"), ("tandem-system", "tandem-leader")}
    assert "--namespace=team-a" in _operator(manifests)["args"]
    assert "--all-namespaces" not in _operator(manifests)["args"]


@pytest.mark.parametrize(
    ("value", "actions"), [("Deny", [["Deny"]]), ("Warn", [["Warn"]]), ("None", [])]
)
def test_the_policy_for_pools_denies_warns_or_is_left_out(
    value: str, actions: list[list[str]]
) -> None:
    bound = [
        manifest["spec"]["validationActions"]
        for manifest in objects("--set", f"poolPolicy={value}")
        if manifest["kind"] == "ValidatingAdmissionPolicyBinding"
    ]
    assert bound == actions


def test_monitoring_needs_the_value_and_the_kinds() -> None:
    values = ("--values", HERE / "values/monitoring.yaml")
    monitoring = {"PodMonitor", "PrometheusRule"}
    assert not kinds(objects(*values)) & monitoring
    assert not kinds(objects(apis=[MONITORING])) & monitoring
    assert monitoring <= kinds(objects(*values, apis=[MONITORING]))


def test_every_object_has_the_standard_labels() -> None:
    for manifest in objects("--values", HERE / "values/monitoring.yaml", apis=[MONITORING]):
        if manifest["kind"] == "CustomResourceDefinition":
            continue
        expected = {"name", "instance", "version", "managed-by", "part-of"}
        actual = {
            label.removeprefix("app.kubernetes.io/") for label in manifest["metadata"]["labels"]
        }
        assert expected <= actual, manifest["metadata"]["name"]


def test_a_release_of_any_name_and_labels_fits() -> None:
    long = objects("--set", f"fullnameOverride={'x' * 63}")
    assert (
        max(
            len(manifest["metadata"]["name"])
            for manifest in long
            if not manifest["kind"].startswith(CLUSTER_SCOPED)
        )
        < 64
    )
    labelled = objects("--set", "operator.podLabels.team=serving")
    (deployment,) = (manifest for manifest in labelled if manifest["kind"] == "Deployment")
    selected = deployment["spec"]["selector"]["matchLabels"].items()
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    assert selected <= pod.items()
    assert pod["team"] == "serving"


def test_the_operator_reads_the_router_settings(tmp_path: Path) -> None:
    assert "ConfigMap" not in kinds(objects("--set", "networkPolicy.enabled=false"))
    values = tmp_path / "values.yaml"
    values.write_text(
        "router: {envoy: {replicas: 3, resources: {limits: {memory: 2Gi}}}, epp: {replicas: 2},"
        " nodeSelector: {disk: fast}, tolerations: [{key: router, operator: Exists}],"
        " priorityClassName: high, imagePullSecrets: [{name: registry}]}"
    )
    manifests = objects("--values", values)
    (config,) = (each for each in manifests if each["kind"] == "ConfigMap")
    ((name, text),) = config["data"].items()
    file = tmp_path / name
    file.write_text(text)
    settings = load_router_settings(file, RouterSettings())
    assert (settings.envoy_replicas, settings.epp_replicas) == (3, 2)
    assert settings.image_pull_secrets == ("registry",)
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    (mount,), (volume,) = _operator(manifests)["volumeMounts"], pod["spec"]["volumes"]
    assert f"--router-settings={mount['mountPath']}/{name}" in _operator(manifests)["args"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    changed = objects("--values", values, "--set", "router.epp.replicas=4")
    (again,) = (each for each in changed if each["kind"] == "Deployment")
    assert again["spec"]["template"]["metadata"] != pod["metadata"], "it is read once"


@pytest.mark.parametrize(
    ("arguments", "apis", "assigned"),
    [
        ((), (), False),
        ((), (OPENSHIFT,), True),
        (("--set", "openshift=true"), (), True),
        (("--set", "openshift=false"), (OPENSHIFT,), False),
    ],
)
def test_no_pod_names_a_user_where_the_platform_assigns_one(
    arguments: tuple[str, ...], apis: tuple[str, ...], assigned: bool
) -> None:
    manifests = objects(*arguments, apis=apis)
    assert ("--assigned-users" in _operator(manifests)["args"]) is assigned
    specs = [
        manifest["spec"]["template"]["spec"]
        if manifest["kind"] == "Deployment"
        else manifest["spec"]
        for manifest in manifests
        if manifest["kind"] in ("Deployment", "Pod")
    ]
    assert len(specs) == 2
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert ("runAsUser" in spec["securityContext"]) is not assigned
        assert ("runAsGroup" in spec["securityContext"]) is not assigned


def test_images_by_digest_variables_and_pull_secrets(tmp_path: Path) -> None:
    digest = f"sha256:{'0' * 64}"
    values = tmp_path / "values.yaml"
    values.write_text(
        f"image: {{repository: registry/tandem, digest: '{digest}'}}\n"
        f"engineImage: registry/engine@{digest}\n"
        f"envoyImage: registry/envoy@{digest}\n"
        "imagePullSecrets: [{name: own}]\n"
        "poolImagePullSecrets: [{name: pools}]\n"
        "operator:\n"
        "  nodeSelector: {disk: fast}\n"
        "  extraEnv: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]\n"
        "  extraEnvFrom: [{secretRef: {name: proxy}}]\n"
        "router: {epp: {envFrom: [{configMapRef: {name: otlp}}]}}\n"
    )
    manifests = objects("--values", values)
    operator = _operator(manifests)
    assert operator["image"] == f"registry/tandem@{digest}"
    assert f"--tandem-image=registry/tandem@{digest}" in operator["args"]
    assert f"--engine-image=registry/engine@{digest}" in operator["args"]
    assert f"--envoy-image=registry/envoy@{digest}" in operator["args"]
    assert "--pool-pull-secret=pools" in operator["args"]
    assert operator["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert operator["env"][-1]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "own"}]
    assert deployment["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}


def test_policies_are_on_by_default_and_name_the_operators_own_pods(tmp_path: Path) -> None:
    manifests = objects("--set", "networkPolicy.gatewayNamespaces={gateways}")
    (config,) = (each for each in manifests if each["kind"] == "ConfigMap")
    file = tmp_path / "router.yaml"
    file.write_text(config["data"]["router.yaml"])
    policy = load_router_settings(file, RouterSettings()).network_policy
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy is not None
    assert policy.operator_labels.items() <= pod.items()
    assert policy.operator_namespace == deployment["metadata"]["namespace"]
    assert policy.prometheus_namespaces == ("monitoring",)
    assert policy.gateway_namespaces == ("gateways",)


def _operator(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = (each for each in manifests if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container
