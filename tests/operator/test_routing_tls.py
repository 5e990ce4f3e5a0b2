"""`routing.tls`: what the pods of an endpoint mount, and which calls go by TLS."""

import json
from typing import Any

import pytest

from tandem_operator.errors import InvalidPool
from tandem_operator.observed import Body
from tandem_operator.pods.manifests import pods
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings

from .endpoints import decode, endpoint
from .pool_yaml import pair
from .rendered_pods import TORCH

TLS = {"tls": {"secretName": "chat-tls"}}
SETTINGS = RouterSettings()


def objects(**routing: Any) -> dict[tuple[str, str], Body]:
    plan = plan_endpoint(endpoint(decode(routing={"endpoint": "chat", **routing})), SETTINGS)
    return {(body["kind"], body["metadata"]["name"]): body for body in plan.apply}


def pod_spec(bodies: dict[tuple[str, str], Body], name: str) -> Body:
    spec = bodies["Deployment", name]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def secrets(spec: Body) -> list[str]:
    return [v["secret"]["secretName"] for v in spec["volumes"] if v["name"] == "tls"]


def test_envoy_calls_epp_and_sidecars_by_tls() -> None:
    bodies = objects(**TLS)
    files = bodies["ConfigMap", "chat-envoy"]["data"]
    clusters = json.loads(files["envoy.json"])["static_resources"]["clusters"]
    by_tls = {c["name"] for c in clusters if "transport_socket" in c}
    assert by_tls == {"picked", "alternate", "decode", "epp"}
    validation = json.loads(files["tls-authorities.json"])["resources"][0]["validation_context"]
    (name,) = validation["match_typed_subject_alt_names"]
    assert name["matcher"] == {"exact": "chat.default.svc"}
    assert secrets(pod_spec(bodies, "chat-envoy")) == ["chat-tls"]


def test_epp_and_sidecar_serve_by_tls() -> None:
    epp = pod_spec(objects(**TLS), "chat-epp")
    assert secrets(epp) == ["chat-tls"]
    assert "--mutual-tls" in epp["containers"][0]["args"]
    (pool_set,) = pair(TORCH, {"accelerator": {}, "routing": TLS})
    prefill, *decodes = pods(pool_set)
    assert "chat-tls" not in str(prefill)
    for pod in decodes:
        (sidecar,) = pod["spec"]["initContainers"]
        directory = sidecar["args"][sidecar["args"].index("--mutual-tls") + 1]
        assert directory in [mount["mountPath"] for mount in sidecar["volumeMounts"]]
        assert secrets(pod["spec"]) == ["chat-tls"]
        # Kubelet's probes go to a port in clear text.
        assert sidecar["readinessProbe"]["httpGet"]["port"] == 8001


def test_it_is_off_by_default() -> None:
    assert "tls" not in json.dumps([*objects().values()]).replace("--accept-tls", "")


def test_turning_it_on_makes_a_new_revision() -> None:
    (clear,), (encrypted,) = (
        pair(TORCH, {"accelerator": {}}),
        pair(TORCH, {"accelerator": {}, "routing": TLS}),
    )
    assert clear.decodes[0].revision != encrypted.decodes[0].revision
    assert clear.decodes[0].compat == encrypted.decodes[0].compat


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"routing": {**TLS, "inferencePool": {"enabled": True}}}, "leave out gatewayRef"),
        ({"routing": {**TLS, "epp": {"enabled": False}}}, "enable epp and envoy"),
        ({"routing": TLS, "role": "unified"}, "leave out routing.tls"),
    ],
)
def test_what_tls_does_not_go_with(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPool, match=words):
        pair(TORCH, {"accelerator": {}, **spec})
