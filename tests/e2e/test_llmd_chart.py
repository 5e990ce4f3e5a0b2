"""llm-d's deployment with Tandem's images in place of its own: requests are split and served.

With TANDEM_LLMD_ROUTER, the path of a checkout of llm-d-router v0.10.0, its standalone chart is
installed by helm, with its configuration for prefill and decode. Otherwise `llmd.router` has
objects of the same shape.
"""

import http.client
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import pytest

from tandem_contract import ports
from tandem_contract.paths import RoutingPath
from tandem_epp.server.http2.health import SERVING
from tests.cluster import node_images
from tests.cluster.node import Node

from .client import chat
from .llmd.picker import answer_in_clear, chosen_protocol, envoy_counted, health_of_ext_proc
from .llmd.router import CLUSTER, HTTP, router
from .site import prompt

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

CHECKOUT = "TANDEM_LLMD_ROUTER"
MODULE = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
DEFINITION = "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml"
ENGINES = Path(__file__).parent / "llmd/engines.yaml"
NAMESPACE, POOL = "llmd", "tiny"
VERSION = version("tandem-llm")
EPP_IMAGE = f"docker.io/library/tandem-epp:{VERSION}"
VALUES = {
    "router": {
        "modelServers": {"matchLabels": {"app": "tiny"}, "targetPorts": [{"number": 8000}]},
        "epp": {
            "image": {
                "registry": "docker.io/library",
                "repository": "tandem-epp",
                "tag": VERSION,
                "pullPolicy": "Never",
            },
            "pluginsConfigFile": "pd.yaml",
            # The chart asks for 8 CPUs, more than the machine may have.
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        },
        "proxy": {
            "image": node_images.ENVOY,
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        },
    }
}
_WAIT = "--timeout=180s"
_TLS_ALERT = b"\x15"
"""The first byte of a record of TLS that refuses a handshake (RFC 8446, 5.1)."""


class Deployment:
    """Pool, picker, Envoy and engines in one namespace."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self._node.kubectl(*arguments, f"--namespace={NAMESPACE}", input=input)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def install(self, scratch: Path) -> None:
        self._node.kubectl("create", "namespace", NAMESPACE)
        self._node.kubectl("apply", "--server-side", f"--filename={definition()}")
        self._node.kubectl("wait", "--for=condition=Established", f"--filename={definition()}")
        engines = Template(ENGINES.read_text()).safe_substitute(VERSION=VERSION)
        self.kubectl("apply", "--filename=-", input=engines)
        if checkout := os.environ.get(CHECKOUT):
            self._install_chart(Path(checkout), scratch)
        else:
            objects = router(POOL, NAMESPACE, EPP_IMAGE, node_images.ENVOY)
            listed = {"apiVersion": "v1", "kind": "List", "items": objects}
            self.kubectl("apply", "--filename=-", input=json.dumps(listed))
        for name in (f"{POOL}-epp", "prefill", "decode"):
            self.kubectl("rollout", "status", f"deployment/{name}", _WAIT)

    def _install_chart(self, checkout: Path, scratch: Path) -> None:
        # helm writes the library chart into the chart that uses it.
        charts = shutil.copytree(checkout / "config/charts", scratch / "charts")
        chart, values = charts / "llm-d-router-standalone", scratch / "values.json"
        configuration = (checkout / "deploy/config/pd-epp-config.yaml").read_text()
        document = json.loads(json.dumps(VALUES))
        document["router"]["epp"]["pluginsCustomConfig"] = {"pd.yaml": configuration}
        values.write_text(json.dumps(document))
        self._node.helm("dependency", "update", str(chart))
        flags = (f"--namespace={NAMESPACE}", f"--values={values}")
        self._node.helm("install", POOL, str(chart), *flags)

    def remove(self) -> None:
        if os.environ.get(CHECKOUT):
            self._node.helm("uninstall", POOL, f"--namespace={NAMESPACE}", "--ignore-not-found")
        self._node.delete_namespaces(NAMESPACE)
        self._node.kubectl("delete", "--ignore-not-found", f"--filename={definition()}")

    @property
    def address(self) -> str:
        """`host:port` of Envoy's Service, reachable from this machine."""
        return f"{self.get('service', f'{POOL}-epp')['spec']['clusterIP']}:{HTTP}"

    def pod(self, selector: str) -> Any:
        (pod,) = self.get("pods", f"--selector={selector}")["items"]
        return pod

    def epp_pod(self) -> Any:
        owned = [p for p in self.get("pods")["items"] if f"{POOL}-epp" in p["metadata"]["name"]]
        (pod,) = owned
        return pod


def definition() -> Path:
    """The definition of InferencePool, from Go's module proxy."""
    go = shutil.which("go")
    assert go is not None, "the node needs Go, too"
    done = subprocess.run(
        [go, "mod", "download", "-json", MODULE], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(json.loads(done.stdout)["Dir"]) / DEFINITION


@pytest.fixture(scope="module")
def deployment(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(node)
    try:
        made.install(tmp_path_factory.mktemp("llmd"))
        yield made
    finally:
        made.remove()


def test_requests_are_split_and_answered_as_by_one_engine(deployment: Deployment) -> None:
    prefill = deployment.pod("llm-d.ai/role=prefill")
    for _ in range(3):
        question = prompt()
        answer = chat(deployment.address, question)
        assert answer.status == 200, answer.text
        assert answer.path == RoutingPath.PREFILL_THEN_DECODE
        alone = chat(f"{prefill['status']['podIP']}:{ports.SIDECAR}", question)
        assert answer.text == alone.text


def test_envoy_calls_the_picker_by_tls_and_nobody_can_without(deployment: Deployment) -> None:
    host = deployment.epp_pod()["status"]["podIP"]
    assert chosen_protocol(host) == "h2"
    assert health_of_ext_proc(host) == SERVING, "Envoy's health check asks the same"
    # Nothing, or an alert of TLS.
    assert answer_in_clear(host)[:1] in (b"", _TLS_ALERT)
    answer = chat(deployment.address, prompt())
    assert (answer.status, answer.path) == (200, RoutingPath.PREFILL_THEN_DECODE)
    for counter in ("ssl_handshake_total", "upstream_cx_http2_total", "upstream_rq_total"):
        assert envoy_counted(host, f"envoy_cluster_{counter}", CLUSTER) > 0, counter


def test_a_prompt_that_is_cached_is_not_split(deployment: Deployment) -> None:
    question = prompt()
    first, second = (chat(deployment.address, question) for _ in range(2))
    assert (first.status, second.status) == (200, 200)
    assert second.path != RoutingPath.PREFILL_THEN_DECODE
    assert first.text == second.text


def test_metrics_need_a_token(deployment: Deployment) -> None:
    host = deployment.epp_pod()["status"]["podIP"]
    connection = http.client.HTTPConnection(host, ports.EPP_METRICS, timeout=30)
    try:
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 401
    finally:
        connection.close()


def test_the_picker_never_restarted(deployment: Deployment) -> None:
    statuses = deployment.epp_pod()["status"]["containerStatuses"]
    assert {each["name"]: each["restartCount"] for each in statuses} == {
        "envoy-proxy": 0,
        "epp": 0,
    }
