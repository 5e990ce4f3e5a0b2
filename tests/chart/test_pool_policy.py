"""What authors of pools may ask for, by the chart's policy on a real API server."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import kubectl
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import Failed

from ..operator.pool_yaml import decode_pool, prefill_pool
from ..operator.test_crd import nodes, root
from . import programs

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("helm")]

ROOT = Path(__file__).parents[2]
_SECONDS = 60
LABEL = "tandem.dev/pool-policy=privileged"


def _pod(**fields: Any) -> dict[str, Any]:
    return {"template": {"spec": fields}}


def _engine(**fields: Any) -> dict[str, Any]:
    return _pod(containers=[{"name": "engine", **fields}])


def _security(**fields: Any) -> dict[str, Any]:
    return _engine(securityContext=fields)


_FROM_SECRET = [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]
_ALL_OF_SECRET = [{"secretRef": {"name": "other"}}]
_STORE = {"endpoint": "https://s3.example"}

SECRETS: dict[str, tuple[dict[str, Any], str]] = {
    "spec.model.source.huggingface.tokenSecretRef": (
        {"model": {"name": "a/b", "source": {"huggingface": {
            "tokenSecretRef": {"name": "other", "key": "k"}}}}},
        "spec.model.source.huggingface.tokenSecretRef.name: author may not read the Secret other",
    ),
    "spec.model.source.s3.credentialsSecretRef": (
        {"model": {"name": "a/b", "source": {"s3": {
            "uri": "s3://bucket/path", "credentialsSecretRef": {"name": "other"}}}}},
        "spec.model.source.s3.credentialsSecretRef.name",
    ),
    "spec.transfer.storage.credentialsSecretRef": (
        {"transfer": {"storage": {**_STORE, "credentialsSecretRef": {"name": "other"}}}},
        "spec.transfer.storage.credentialsSecretRef.name",
    ),
    "spec.engine.env[].valueFrom.secretKeyRef": (
        {"engine": {"env": _FROM_SECRET}}, "spec.engine: env"),
    "spec.engine.envFrom[].secretRef": (
        {"engine": {"envFrom": _ALL_OF_SECRET}}, "spec.engine: env"),
    "spec.routing.envoy.apiKeySecretRef": (
        {"routing": {"envoy": {"apiKeySecretRef": {"name": "other"}}}},
        "spec.routing.envoy.apiKeySecretRef.name",
    ),
    "spec.routing.tls.secretName": (
        {"routing": {"tls": {"secretName": "other"}}}, "spec.routing.tls.secretName",
    ),
    "spec.routing.epp.env[].valueFrom.secretKeyRef": (
        {"routing": {"epp": {"env": _FROM_SECRET}}}, "spec.routing.epp: env"),
    "spec.routing.epp.envFrom[].secretRef": (
        {"routing": {"epp": {"envFrom": _ALL_OF_SECRET}}}, "spec.routing.epp: env"),
    "spec.routing.envoy.env[].valueFrom.secretKeyRef": (
        {"routing": {"envoy": {"env": _FROM_SECRET}}}, "spec.routing.envoy: env"),
    "spec.routing.envoy.envFrom[].secretRef": (
        {"routing": {"envoy": {"envFrom": _ALL_OF_SECRET}}}, "spec.routing.envoy: env"),
}  # fmt: skip
"""A spec that names a Secret, and its refusal, by the field of the CRDs."""

ANY_SECRET = [spec for spec, _ in SECRETS.values()]
ACCOUNT = _pod(serviceAccountName="other", automountServiceAccountToken=True)
PICKER = {"routing": {"endpoint": "chat", "epp": {"image": "a:1"}}}
EXPOSED = {"routing": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    *SECRETS.values(),
    (_engine(env=_FROM_SECRET), "a container or volume names a Secret"),
    (_engine(envFrom=_ALL_OF_SECRET), "a container or volume names a Secret"),
    (_pod(initContainers=[{"name": "sidecar", "env": _FROM_SECRET}]), "names a Secret"),
    (_pod(volumes=[{"name": "v", "secret": {"secretName": "other"}}]), "names a Secret"),
    (_pod(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": "other"}}]}}]),
     "names a Secret"),
    *((_pod(**{field: True}), f"spec.template.spec.{field}: pools may not set")
      for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")),
    (_pod(nodeName="node-1"), "spec.template.spec.nodeName"),
    (_pod(serviceAccount="other"), "spec.template.spec.serviceAccount"),
    (_pod(ephemeralContainers=[{"name": "x"}]), "spec.template.spec.ephemeralContainers"),
    (_pod(**{"$patch": "replace"}), "spec.template.spec.$patch"),
    (_pod(volumes=[{"name": "v", "hostPath": {"path": "/"}}]),
     "spec.template.spec.volumes: volume v may not have hostPath"),
    (_pod(volumes=[{"name": "v", "nfs": {"server": "x", "path": "/"}}]), "may not have nfs"),
    (_pod(volumes=[{"name": "v", "csi": {"driver": "x"}}]), "may not have csi"),
    (_pod(containers=None), "containers"),
    (_engine(stdin=True), "container engine may not have stdin"),
    (_engine(volumeDevices=[]), "container engine may not have volumeDevices"),
    (_engine(**{"$patch": "replace"}), "container engine may not have $patch"),
    (_engine(ports=[{"containerPort": 1, "hostPort": 1}]), "hostPort opens a port"),
    (_engine(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}}), "names a host"),
    (_engine(lifecycle={"postStart": {"tcpSocket": {"host": "x", "port": 1}}}), "names a host"),
    *((fault, "a securityContext removes or widens") for fault in (
        _pod(securityContext=None),
        _pod(securityContext={"sysctls": []}),
        _pod(securityContext={"$patch": "replace"}),
        _pod(securityContext={"runAsNonRoot": None}),
        _pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        _pod(initContainers=[{"name": "sidecar", "securityContext": {"privileged": True}}]),
        _engine(securityContext=None),
        _security(privileged=True),
        _security(allowPrivilegeEscalation=True),
        _security(allowPrivilegeEscalation=None),
        _security(runAsUser=0),
        _security(runAsNonRoot=False),
        _security(procMount="Unmasked"),
        _security(seLinuxOptions={"type": "spc_t"}),
        _security(appArmorProfile={"type": "Unconfined"}),
    )),
    *((_security(capabilities=capabilities), "capabilities of a securityContext")
      for capabilities in (
          {"add": ["SYS_ADMIN"]}, {"drop": []}, {"drop": None}, {"$patch": "replace"})),
    (_pod(priorityClassName="system-node-critical"), "spec.template.spec.priorityClassName"),
    ({"template": {"metadata": {"annotations": {
        "container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}}}}, "AppArmor"),
    ({"routing": {"podMetadata": {"annotations": {
        "container.apparmor.security.beta.kubernetes.io/envoy": "unconfined"}}}}, "AppArmor"),
    ({"model": {"name": "a/b", "source": {"path": "/etc"}}}, "spec.model.source.path"),
    (_pod(serviceAccountName="other"), "act as service account other, and author may not"),
    (_pod(automountServiceAccountToken=True), "act as service account default"),
    (_pod(automountServiceAccountToken=None), "act as service account default"),
    (_pod(volumes=[{"name": "v", "projected": {"sources": [
        {"serviceAccountToken": {"path": "t"}}]}}]), "act as service account default"),
    ({"routing": {"epp": {"image": "a:1"}}}, "would act as service account refused-"),
    ({"routing": {"endpoint": "chat", "epp": {"image": "a:1"}}}, "act as service account chat-epp"),
    ({"routing": {"service": {"type": "LoadBalancer"}}}, "author may not create Services"),
    ({"routing": {"service": {"annotations": {"a": "b"}}}}, "author may not create Services"),
]  # fmt: skip

ALLOWED: list[dict[str, Any]] = [
    {},
    {"engine": {
        "image": "a:0.32.0", "extraArgs": ["--x"], "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
            {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "resources": {"requests": {"cpu": 1}},
    }},
    {"accelerator": {
        "count": 1, "nodeSelector": {"gpu": "h100"}, "tolerations": [{"operator": "Exists"}]}},
    {"imagePullSecrets": [{"name": "registry"}], "transfer": {"rdma": {"resource": "rdma/ib"}}},
    {"model": {"name": "a/b", "source": {"pvc": {"claimName": "models"}}}},
    {"routing": {
        "envoy": {"image": "a:1"},
        "podMetadata": {"annotations": {"sidecar.istio.io/inject": "true"}}}},
    {"routing": {"service": {"type": "ClusterIP"}, "epp": {"env": [{"name": "A", "value": "1"}]}}},
    {"template": {"metadata": {"labels": {"team": "a"}, "annotations": {"a": "b"}}, "spec": {
        "priorityClassName": "serving", "schedulerName": "kai", "runtimeClassName": "nvidia",
        "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "affinity": {},
        "topologySpreadConstraints": [], "imagePullSecrets": [{"name": "registry"}],
        "terminationGracePeriodSeconds": 60, "hostAliases": [], "dnsPolicy": "Default",
        "dnsConfig": {}, "automountServiceAccountToken": False, "hostUsers": False,
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nic"}],
        "securityContext": {
            "fsGroup": 1, "runAsUser": 1, "runAsGroup": 1, "supplementalGroups": [1],
            "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c"}},
            {"name": "c", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "d", "downwardAPI": {}},
            {"name": "e", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
        ],
    }}},
    _engine(
        command=["x"], args=["y"], env=[{"name": "A", "value": "1"}],
        resources={"claims": [{"name": "nic"}]},
        volumeMounts=[{"name": "a", "mountPath": "/a"}],
        ports=[{"containerPort": 1, "name": "p", "protocol": "TCP"}],
        livenessProbe={"httpGet": {"path": "/health", "port": 1}},
        securityContext={
            "privileged": False, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    ),
    # From docs/run/vllm.md, for RDMA under restricted pod security.
    _security(capabilities={"add": None}),
    # From docs/run/storage.md, for a store with a private authority.
    _pod(
        volumes=[{"name": "store-ca", "configMap": {"name": "store-ca"}}],
        containers=[{"name": "engine", "volumeMounts": [
            {"name": "store-ca", "mountPath": "/etc/store-ca", "readOnly": True}]}],
    ),
    _pod(containers=[{"name": "helper", "image": "a:1", "restartPolicy": "Always"}]),
]  # fmt: skip


def _pools(specs: list[dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """A pool of each spec by its name: a DecodePool, which has all fields."""
    return {
        f"{name}-{i}": {**decode_pool(**spec), "metadata": {"name": f"{name}-{i}"}}
        for i, spec in enumerate(specs)
    }


class Author:
    """A user who may write pools in a namespace and nothing else, until it is granted more."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._admin = control_plane
        self._namespace = namespace
        self._kubeconfig = control_plane.kubeconfig_for("author")
        self.grant("pools", "*", "prefillpools.tandem.dev,decodepools.tandem.dev")

    def grant(self, name: str, verb: str, resource: str, *flags: str) -> None:
        create, namespace = self._admin.kubectl, f"--namespace={self._namespace}"
        create(
            *("create", "role", name, f"--verb={verb}", f"--resource={resource}"), *flags, namespace
        )
        create(*("create", "rolebinding", name, f"--role={name}", "--user=author"), namespace)

    def kubectl(self, *arguments: str, body: str | None = None) -> str:
        """Raises Failed."""
        return kubectl.run(
            self._kubeconfig, *arguments, f"--namespace={self._namespace}", input=body
        )

    def refusals(self, pools: Mapping[str, dict[str, Any]]) -> dict[str, str]:
        """Which of the pools the API server would not create, and its message."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(pools.values())})
        try:
            self.kubectl("create", "--dry-run=server", "--filename=-", body=listed)
        except Failed as failed:
            lines = failed.stderr.splitlines()
            return {found[1]: line for line in lines if (found := re.search(r'"([^"]+)" is', line))}
        return {}


@pytest.fixture(scope="module")
def policy(crds: ControlPlane) -> Iterator[None]:
    """The chart's policy, in force."""
    manifests = programs.objects("--set", "crds.install=false")
    policies = [m for m in manifests if m["kind"].startswith("ValidatingAdmissionPolicy")]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": policies})
    crds.kubectl("create", "--validate=strict", "--filename=-", input=listed)
    probe = json.dumps({**prefill_pool(**_pod(hostPID=True)), "metadata": {"name": "probe"}})

    def is_in_force() -> bool:
        try:
            crds.kubectl("create", "--dry-run=server", "--filename=-", input=probe)
        except Failed:
            return True
        return False

    _until(is_in_force)
    yield
    crds.kubectl("delete", "--filename=-", input=listed)
    _until(lambda: not is_in_force())


@pytest.fixture
def author(policy: None, crds: ControlPlane, namespace: str) -> Author:
    author = Author(crds, namespace)
    _until(lambda: not author.refusals(_pools([{}], "may-write")))
    return author


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_every_power_beyond_a_plain_pod_is_refused_by_name(author: Author) -> None:
    pools = _pools([spec for spec, _ in REFUSED], "refused")
    refusals = author.refusals(pools)
    for (spec, message), name in zip(REFUSED, pools, strict=True):
        assert message in refusals.get(name, ""), (spec, refusals.get(name))
        # Where the rule could not be evaluated, the API server says the rule instead.
        assert f"the label {LABEL} of namespace" in refusals[name] or spec == _pod(containers=None)


def test_what_ordinary_pools_need_is_accepted(author: Author) -> None:
    assert author.refusals(_pools(ALLOWED, "allowed")) == {}


def test_a_large_pool_is_within_the_cost_that_rules_may_have(author: Author) -> None:
    env = [{"name": f"V{i}", "value": "x" * 500} for i in range(64)]
    containers = [{"name": f"c{i}", "env": env} for i in range(10)]
    large = {
        **_pod(containers=containers),
        "engine": {"env": env},
        "routing": {
            "epp": {"env": env, "config": {"text": ["x" * 1000] * 100}},
            "envoy": {"env": env},
            "service": {"annotations": {f"a{i}": "x" * 100 for i in range(30)}},
        },
    }
    pool = decode_pool(**large)
    author.grant("services", "create", "services")
    _until(lambda: not author.refusals({"d": pool}))
    author.kubectl("create", "--filename=-", body=json.dumps(pool))
    pool["spec"]["routing"]["epp"]["config"]["text"][-1] = "y"
    author.kubectl("replace", "--filename=-", body=json.dumps(pool))


def test_prefill_pools_have_the_same_rules(author: Author) -> None:
    for spec, refused in ((_pod(hostNetwork=True), True), ({}, False)):
        pool = prefill_pool(**spec)
        assert bool(author.refusals({"p": pool})) == refused


def test_every_secret_that_the_schema_lets_a_pool_name_has_a_case() -> None:
    named = {
        path.removeprefix(".")
        for kind in ("PrefillPool", "DecodePool")
        for path, _ in nodes(root(kind))
        if re.search(r"(Secret|secret|secretKey)(Ref|Name)$", path)
    }
    assert named == SECRETS.keys()


def test_every_field_without_a_schema_was_considered() -> None:
    free = {
        path.removeprefix(".")
        for kind in ("PrefillPool", "DecodePool")
        for path, node in nodes(root(kind))
        if node.get("x-kubernetes-preserve-unknown-fields")
    }
    # Only the first is a part of a Pod. The others are settings of the EPP and of connectors, which
    # programs read in their containers.
    assert free == {
        "spec.template.spec",
        "spec.routing.epp.config",
        "spec.transfer.extraConfig",
        "spec.transfer.connectors[].extraConfig",
    }


def test_a_right_permits_what_the_author_could_do_without_a_pool(author: Author) -> None:
    token = SECRETS["spec.model.source.huggingface.tokenSecretRef"][0]
    for specs, grant in (
        ([token], ("named", "get", "secrets", "--resource-name=other")),
        ([ACCOUNT], ("account", "impersonate", "serviceaccounts", "--resource-name=other")),
        ([PICKER], ("picker", "impersonate", "serviceaccounts", "--resource-name=chat-epp")),
        ([EXPOSED], ("services", "create", "services")),
        (ANY_SECRET, ("secrets", "get", "secrets")),
    ):
        pools = _pools(specs, "granted")
        assert author.refusals(pools)
        author.grant(*grant)
        _until(lambda pools=pools: author.refusals(pools) == {})
    assert author.refusals(_pools([_pod(hostNetwork=True)], "privileged"))


def test_the_label_of_the_namespace_permits_everything(
    author: Author, control_plane: ControlPlane, namespace: str
) -> None:
    pools = _pools([spec for spec, _ in REFUSED], "labelled")
    control_plane.kubectl("label", "namespace", namespace, LABEL)
    _until(lambda: author.refusals(pools) == {})


def test_a_pool_from_before_the_policy_can_be_scaled_released_and_deleted(
    author: Author, control_plane: ControlPlane, namespace: str
) -> None:
    old = {"old": {**decode_pool(**_pod(hostNetwork=True)), "metadata": {"name": "old"}}}
    control_plane.kubectl("label", "namespace", namespace, LABEL)
    _until(lambda: author.refusals(old) == {})
    author.kubectl("create", "--filename=-", body=json.dumps(old["old"]))
    control_plane.kubectl("label", "namespace", namespace, LABEL.partition("=")[0] + "-")
    _until(lambda: author.refusals(_pools([_pod(hostNetwork=True)], "new")) != {})

    def patch(change: dict[str, Any]) -> None:
        author.kubectl("patch", "decodepool/old", "--type=merge", f"--patch={json.dumps(change)}")

    with pytest.raises(Failed, match=r"spec\.template\.spec\.hostNetwork: pools may not set"):
        patch({"spec": {"engine": {"maxNumSeqs": 7}}})
    patch({"spec": {"replicas": 3, "paused": True}})
    patch({"metadata": {"labels": {"a": "b"}, "finalizers": ["example.com/held"]}})
    control_plane.kubectl(
        *("patch", "decodepool/old", "--type=merge", "--subresource=status"),
        *('--patch={"status": {"replicas": 1}}', f"--namespace={namespace}"),
    )
    author.kubectl("delete", "decodepool/old", "--wait=false")
    patch({"metadata": {"finalizers": None}})
    assert not author.kubectl("get", "decodepools", "--output=name")


def test_the_clusters_editors_may_apply_every_example(
    author: Author, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl(
        *("create", "rolebinding", "edit", "--clusterrole=edit", "--user=author"),
        f"--namespace={namespace}",
    )
    rights = _pools([*ANY_SECRET, ACCOUNT, PICKER, EXPOSED], "editor")
    _until(lambda: author.refusals(rights) == {})
    author.kubectl("create", "--dry-run=server", f"--filename={ROOT / 'examples'}")
    page = (ROOT / "docs/run/pools.md").read_text()
    for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        author.kubectl("create", "--dry-run=server", "--filename=-", body=text)
