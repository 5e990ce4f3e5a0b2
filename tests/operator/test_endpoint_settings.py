"""The file of --router-settings: what it sets, and one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tandem_contract.documents import DocumentError
from tandem_operator.main import main
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings, load_router_settings

from .endpoints import decode, endpoint

FULL = """\
envoy: {replicas: 3, threads: 2, resources: {requests: {cpu: 1}, limits: {memory: 2Gi}}}
epp:
  replicas: 3
  resources: {requests: {cpu: 500m}}
  env: [{name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}, {name: A, value: b}]
  envFrom: [{prefix: S_, secretRef: {name: s}}]
nodeSelector: {disk: fast}
tolerations: [{key: router, operator: Exists, effect: NoSchedule}]
priorityClassName: high
imagePullSecrets: [{name: registry}]
"""


def settings_of(text: str, folder: Path) -> RouterSettings:
    file = folder / "router.yaml"
    file.write_text(text)
    return load_router_settings(file, RouterSettings(envoy_image="mine"))


def test_every_setting_reaches_the_pods(tmp_path: Path) -> None:
    settings = settings_of(FULL, tmp_path)
    deployments = {
        body["metadata"]["name"]: body["spec"]
        for body in plan_endpoint(endpoint(), settings).apply
        if body["kind"] == "Deployment"
    }
    assert {name: spec["replicas"] for name, spec in deployments.items()} == {
        "chat-envoy": 3,
        "chat-epp": 3,
    }
    for spec in deployments.values():
        pod = spec["template"]["spec"]
        assert pod["nodeSelector"] == {"disk": "fast"}
        assert pod["tolerations"] == [
            {"key": "router", "operator": "Exists", "effect": "NoSchedule"}
        ]
        assert pod["priorityClassName"] == "high"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    (envoy,) = deployments["chat-envoy"]["template"]["spec"]["initContainers"]
    assert envoy["image"] == "mine"
    assert "env" not in envoy
    (epp,) = deployments["chat-epp"]["template"]["spec"]["containers"]
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert epp["env"] == [{"name": "NODE", "valueFrom": field}, {"name": "A", "value": "b"}]
    assert epp["envFrom"] == [{"prefix": "S_", "secretRef": {"name": "s"}}]
    assert envoy["resources"] == {"requests": {"cpu": 1}, "limits": {"memory": "2Gi"}}
    assert envoy["args"][envoy["args"].index("--concurrency") + 1] == "2"


@pytest.mark.parametrize(
    ("text", "stated", "replicas"),
    [
        ("epp: {replicas: 3}", {}, 3),
        ("{epp: {replicas: 3}, router: {replicas: 5}}", {}, 5),
        ("router: {replicas: 5}", {"epp": {"replicas": 4}}, 4),
    ],
)
def test_there_are_as_many_routers_as_the_pools_or_the_file_say(
    tmp_path: Path, text: str, stated: dict[str, Any], replicas: int
) -> None:
    pool = decode(routing={"front": "router", **stated})
    [router] = (
        body
        for body in plan_endpoint(endpoint(pool), settings_of(text, tmp_path)).apply
        if body["kind"] == "Deployment"
    )
    assert router["spec"]["replicas"] == replicas


@pytest.mark.parametrize(
    ("text", "epp", "router"),
    [
        ("nodeSelector: {disk: fast}", "1Gi", "2Gi"),
        ("epp: {resources: {limits: {memory: 9Gi}}}", "9Gi", "9Gi"),
        ("router: {resources: {limits: {memory: 9Gi}}}", "1Gi", "9Gi"),
        (
            "{epp: {resources: {limits: {memory: 3Gi}}},"
            " router: {resources: {limits: {memory: 9Gi}}}}",
            "3Gi",
            "9Gi",
        ),
    ],
)
def test_the_router_has_more_memory_than_an_epp_unless_the_file_says_how_much(
    tmp_path: Path, text: str, epp: str, router: str
) -> None:
    settings = settings_of(text, tmp_path)
    limits = {
        body["metadata"]["name"]: body["spec"]["template"]["spec"]["containers"][0]["resources"][
            "limits"
        ]
        for front in ("envoy", "router")
        for body in plan_endpoint(endpoint(decode(routing={"front": front})), settings).apply
        if body["kind"] == "Deployment"
    }
    assert limits["chat-epp"] == {"memory": epp}
    assert limits["chat-router"] == {"memory": router}


def test_a_pools_own_fields_win_over_the_installations(tmp_path: Path) -> None:
    field = {"fieldRef": {"fieldPath": "status.hostIP"}}
    image = "registry/{}@sha256:" + "a" * 64
    routing = {
        "nodeSelector": {"pool": "routers"},
        "tolerations": [{"key": "routers", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "team"}, {"name": "registry"}],
        "epp": {
            "image": image.format("tandem"),
            "env": [{"name": "A", "value": "mine"}, {"name": "HOST", "valueFrom": field}],
            "envFrom": [{"configMapRef": {"name": "team"}}],
        },
        "envoy": {"image": image.format("envoy"), "env": [{"name": "B", "value": "c"}]},
    }
    settings = settings_of(FULL, tmp_path)
    pods = {
        body["metadata"]["name"]: body["spec"]["template"]["spec"]
        for body in plan_endpoint(endpoint(decode(routing=routing)), settings).apply
        if body["kind"] == "Deployment"
    }
    assert set(pods) == {"chat-envoy", "chat-epp"}
    for pod in pods.values():
        assert pod["nodeSelector"] == {"pool": "routers"}
        assert pod["tolerations"] == [{"key": "routers", "operator": "Exists"}]
        assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "team"}]
        # What no pool can say stays the installation's.
        assert pod["priorityClassName"] == "high"
    (epp,) = pods["chat-epp"]["containers"]
    assert epp["image"] == image.format("tandem")
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert epp["env"] == [
        {"name": "NODE", "valueFrom": node},
        {"name": "A", "value": "mine"},
        {"name": "HOST", "valueFrom": field},
    ]
    assert epp["envFrom"] == [
        {"prefix": "S_", "secretRef": {"name": "s"}},
        {"configMapRef": {"name": "team"}},
    ]
    (envoy,) = pods["chat-envoy"]["initContainers"]
    assert envoy["image"] == image.format("envoy")
    assert envoy["env"] == [{"name": "B", "value": "c"}]
    # Tandem's own program beside Envoy.
    assert pods["chat-envoy"]["containers"][0]["image"] == image.format("tandem")


def test_omitted_fields_keep_their_defaults(tmp_path: Path) -> None:
    assert settings_of("epp: {replicas: 3}", tmp_path) == RouterSettings(
        envoy_image="mine", epp_replicas=3
    )


def test_the_documented_file_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/run/routing.md").read_text()
    (text,) = (part for part in page.split("```") if part.startswith("yaml\nenvoy:"))
    assert settings_of(text.removeprefix("yaml\n"), tmp_path).priority_class


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: expected one YAML mapping of envoy, epp, router, kvCacheIndex"),
        ("[]", ":1: expected one YAML mapping of"),
        ("a: 1\nenvoy: {}", ":1: Object contains unknown field `a`"),
        ("epp: {}\nenvoy: {replica: 2}", ":2: envoy: Object contains unknown field `replica`"),
        ("envoy: {replicas: 0}", ":1: envoy.replicas: Expected `int` >= 1"),
        ("epp:\n  resources:\n    limits: {memory: 1GB}", ":3: epp.resources.limits.memory: '1GB'"),
        ("nodeSelector: {gpu: true}", "Expected `str`, got `bool`"),
        ("tolerations: [{key: a, effect: Never}]", "tolerations[0].effect: Invalid enum value"),
        ("envoy: [", "not YAML"),
    ],
)
def test_errors_name_file_line_and_field(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DocumentError) as refused:
        settings_of(text, tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_operator_refuses_to_start_with_an_invalid_file(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    result = CliRunner().invoke(main, ["--all-namespaces", "--router-settings", str(file)])
    assert result.exit_code == 2
    assert result.stderr == f"error: {file}: cannot read it: No such file or directory\n"


def test_epps_count_kv_in_storage_if_it_is_set(tmp_path: Path) -> None:
    def section(text: str) -> object:
        bodies = plan_endpoint(endpoint(), settings_of(text, tmp_path)).apply
        config = next(b for b in bodies if b["kind"] == "ConfigMap" and "router.yaml" in b["data"])
        return json.loads(config["data"]["router.yaml"]).get("kv_cache_index")

    text = "kvCacheIndex: {storageOffloading: {enabled: true}}"
    assert section(text) == {"storage_offloading": {"enabled": True}}
    assert section("epp: {replicas: 3}") is None
