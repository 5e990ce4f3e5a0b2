"""Envoy Gateway on the node, from examples/gateways/envoy-gateway.yaml: its controller, in a pod,
makes and configures the gateway's Envoy, and our EPP chooses among pods that answer what they got.
"""

import http.client
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import headers as wire
from tests.cluster import gateway_crds, gobuild, kubectl, node_images, tools
from tests.cluster.node import Node

from .conformance import ECHO_IMAGE
from .site import APP, manifest

pytestmark = [
    pytest.mark.node,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("envoy_gateway_program", "conformance_program"),
]

DEFINITIONS = (gateway_crds.GATEWAY_API, gateway_crds.ENVOY_GATEWAY)
SYSTEM, NAMESPACE = "envoy-gateway-system", "llama"
IMAGE = "localhost/envoy-gateway:1"
GATEWAY = "gateway-envoy"
"""Deployment and Service that Envoy Gateway makes for the Gateway."""
VALUES = {
    "crds": {"enabled": False},
    "topologyInjector": {"enabled": False},
    "global": {"images": {"envoyGateway": {"image": IMAGE, "pullPolicy": "Never"}}},
    "config": {
        "envoyGateway": {
            "extensionApis": {"enableBackend": True},
            "provider": {
                "type": "Kubernetes",
                "kubernetes": {"shutdownManager": {"image": IMAGE}},
            },
            "envoyProxy": {
                "provider": {
                    "type": "Kubernetes",
                    "kubernetes": {
                        "envoyDeployment": {
                            "name": GATEWAY,
                            "container": {"image": node_images.ENVOY},
                        },
                        "envoyService": {"name": GATEWAY, "type": "ClusterIP"},
                    },
                }
            },
        }
    },
}
ROUTER = """
disaggregated_serving: {enabled: true}
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 32}}
"""
_WAIT = "--timeout=180s"


class Site:
    """Envoy Gateway, its gateway, our EPP, one prefill pod and two decode pods."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self._node.kubectl(*arguments, f"--namespace={NAMESPACE}", input=input)

    def apply(self, objects: list[Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--filename=-", input=json.dumps(listed))

    def addresses(self, role: str) -> dict[str, str]:
        """Pod name → `ip:port` of the pods with a role."""
        selector = f"--selector=app=llama,llm-d.ai/role={role}"
        pods = json.loads(self.kubectl("get", "pods", selector, "--output=json"))["items"]
        return {pod["metadata"]["name"]: f"{pod['status']['podIP']}:8000" for pod in pods}

    def install(self, folder: Path) -> None:
        chart = folder / "chart"
        shutil.copytree(chart_source(), chart)
        # The release fills in two variables, which are images of ours here.
        (chart / "values.tmpl.yaml").rename(chart / "values.yaml")
        values = folder / "values.json"
        values.write_text(json.dumps(VALUES))
        self._node.kubectl("create", "namespace", SYSTEM)
        flags = (f"--namespace={SYSTEM}", f"--values={values}", "--wait", "--timeout=180s")
        self._node.helm("install", "eg", str(chart), *flags)
        self._node.kubectl("create", "namespace", NAMESPACE)
        self.apply([*pods("prefill", 1), *pods("decode", 2), *picker(), *route()])
        for name in ("prefill", "decode", "llama-epp"):
            self.kubectl("rollout", "status", f"deployment/{name}", _WAIT)
        system = f"--namespace={SYSTEM}"
        self._node.kubectl("wait", "--for=create", f"deployment/{GATEWAY}", system, _WAIT)
        self._node.kubectl("rollout", "status", f"deployment/{GATEWAY}", system, _WAIT)
        self.kubectl("wait", "--for=condition=Programmed", "gateway/inference-gateway", _WAIT)
        service = self._node.kubectl("get", "service", GATEWAY, system, "--output=json")
        self.gateway = json.loads(service)["spec"]["clusterIP"]
        # Routes reach Envoy after the listeners.
        deadline = time.monotonic() + 60
        while (answer := self.ask("ready?"))[0] != 200:
            assert time.monotonic() < deadline, answer
            time.sleep(0.2)

    def remove(self) -> None:
        flags = (f"--namespace={SYSTEM}", "--ignore-not-found", "--wait")
        # While the controller runs, which removes the finalizer of its GatewayClass.
        self._node.delete_namespaces(NAMESPACE)
        self._node.helm("uninstall", "eg", *flags)
        self._node.delete_namespaces(SYSTEM)
        self._node.kubectl("delete", "gatewayclass", "envoy-gateway", "--ignore-not-found")

    def ask(self, prompt: object) -> tuple[int, Any]:
        """Status and answer of a completion's request."""
        connection = http.client.HTTPConnection(self.gateway, 80, timeout=30)
        try:
            body = json.dumps({"model": "m", "prompt": prompt})
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] == b"{" else text
        finally:
            connection.close()


def chart_source() -> Path:
    """The chart in Envoy Gateway's module."""
    go = shutil.which("go")
    assert go is not None, "the node needs Go, too"
    module = gateway_crds.module_folder(go, gateway_crds.ENVOY_GATEWAY, tools.cache())
    return module / "charts/gateway-helm"


def pods(role: str, count: int) -> list[Any]:
    labels = {**APP, "llm-d.ai/role": role}
    fields = {"POD_NAME": "metadata.name", "NAMESPACE": "metadata.namespace"}
    references = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    container = {
        "name": "engine",
        "image": ECHO_IMAGE,
        "env": [{"name": "HTTP_PORT", "value": "8000"}, *references],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": count, "selector": {"matchLabels": labels}, "template": template}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": role}, "spec": spec}
    ]


def picker() -> list[Any]:
    """examples/gateways/epp.yaml for a gateway without InferencePools, one replica."""
    objects = [each for each in manifest("epp") if each["kind"] != "InferencePool"]
    for each in objects:
        if each["kind"] == "ConfigMap":
            each["data"]["router.yaml"] = ROUTER
        if each["kind"] == "Deployment":
            each["spec"]["replicas"] = 1
            (container,) = each["spec"]["template"]["spec"]["containers"]
            container["image"] = f"docker.io/library/tandem-epp:{version('tandem-llm')}"
            container["args"].remove("--pool-name=llama")
            container["args"] += ["--endpoint-selector=app=llama", "--endpoint-target-ports=8000"]
    return objects


def route() -> list[Any]:
    """The manifest of Envoy Gateway, for our namespace."""
    text = json.dumps(manifest("envoy-gateway"))
    objects: list[Any] = json.loads(text.replace(".default.svc", f".{NAMESPACE}.svc"))
    return objects


@contextmanager
def prepared(node: Node, folder: Path) -> Iterator[None]:
    """The node with the definitions and images."""
    for reference, name, at in (
        (ECHO_IMAGE, gobuild.ECHO, "/echo-basic"),
        (IMAGE, "envoy-gateway", "/usr/local/bin/envoy-gateway"),
    ):
        node.load_image(node_images.write_image(folder, reference, tools.path(name), at))
    definitions = [f"--filename={each.folder(tools.cache())}" for each in DEFINITIONS]
    with ExitStack() as stack:
        stack.callback(node.kubectl, "delete", "--ignore-not-found", *definitions)
        node.kubectl("apply", "--server-side", *definitions)
        kubectl.wait_until_established(node.kubeconfig, *definitions)
        yield


@pytest.fixture(scope="module")
def site(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("envoy-gateway")
    with prepared(node, folder):
        made = Site(node)
        try:
            made.install(folder)
            yield made
        finally:
            made.remove()


def test_requests_go_to_the_pod_that_the_epp_chose(site: Site) -> None:
    decode, (prefill,) = site.addresses("decode"), site.addresses("prefill").values()
    for number in range(8):
        status, answer = site.ask(f"{number} " + "word " * 200)
        assert status == 200, answer
        headers = {name.lower(): values for name, values in answer["headers"].items()}
        assert headers[wire.DESTINATION_ENDPOINT] == [decode[answer["pod"]]]
        assert headers[wire.PREFILLER_HOST_PORT] == [prefill]


def test_the_epp_answers_itself_through_the_gateway(site: Site) -> None:
    status, answer = site.ask(["not", {"a": "prompt"}])
    assert status == 400, answer
    assert answer["error"]["code"] == 400
