"""The gateway conformance suite of the Gateway API Inference Extension, with our EPP as its picker.

The suite brings its own manifest: two Gateways, InferencePools, pods that answer what they were
asked, and a picker per pool. `base` puts our EPP in the place of these pickers and adds what Istio
in a whole cluster would create itself: a Service and an Envoy for each Gateway.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster import gobuild, node_images, tools
from tests.cluster.node import Node

from .istio import GATEWAY_LABEL, Istiod, address, bootstrap, node_id

Object = dict[str, Any]

INFRA: Final = "inference-conformance-infra"
BACKEND: Final = "inference-conformance-app-backend"
ECHO_IMAGE: Final = "localhost/echo-basic:1"
_EPP_IMAGE: Final = f"docker.io/library/tandem-epp:{version('tandem-llm')}"
_CLASS: Final = "istio"
_ADMIN: Final = 15000
# The suite requests paths of its own, and tells the picker which pod a request may go to.
_CONFIGURATION: Final = {
    "disaggregated_serving": {"enabled": False, "api_paths": ["/**"]},
    "plugins": [
        {"type": "header-based-testing-filter"},
        {"type": "destination-endpoint-served-verifier"},
    ],
}
_CONSISTENCY: Final = "12s"
"""How long a test waits for three equal answers in a row: several times what those that pass need.
Those that fail wait for all of it, one of them three times."""
_RESULT: Final = re.compile(r"^ {4,8}--- (PASS|FAIL|SKIP): Conformance/(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Results:
    """The output of the suite."""

    output: str

    @property
    def names(self) -> set[str]:
        """The suite's tests."""
        return {name for _, name in _RESULT.findall(self.output) if "/" not in name}

    def of(self, name: str) -> str | None:
        """PASS, FAIL or SKIP of a test, or of `test/part`; None if the suite did not reach it."""
        return next((r for r, found in _RESULT.findall(self.output) if found == name), None)

    def output_of(self, name: str) -> str:
        """The end of what the test `name` printed."""
        _, _, after = self.output.partition(f"=== RUN   Conformance/{name}\n")
        return re.split(r"=== RUN   Conformance/\w+\n", after)[0][-4000:]


def run(node: Node, control: Istiod, folder: Path) -> Results:
    """Run the suite; its output is in `folder`, too."""
    file = folder / "base.yaml"
    file.write_text(yaml.safe_dump_all(base(control), sort_keys=False))
    done = subprocess.run(
        [
            str(tools.path(gobuild.CONFORMANCE)),
            *("-test.v", "-test.timeout=8m", f"-base={file}", f"-consistency={_CONSISTENCY}"),
            *(f"-gateway-class={_CLASS}", "-cleanup-base-resources=false"),
        ],
        env=os.environ | {"KUBECONFIG": str(node.kubeconfig)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "suite.log").write_text(done.stdout)
    return Results(done.stdout)


def base(control: Istiod) -> list[Object]:
    """The suite's base manifest with our EPP, and the Gateways' pods."""
    program = str(tools.path(gobuild.CONFORMANCE))
    text = subprocess.run([program, "base"], stdout=subprocess.PIPE, check=True).stdout
    objects = [_with_our_images(each) for each in yaml.safe_load_all(text) if each]
    for each in list(objects):
        name = each["metadata"]["name"]
        if each["kind"] == "Gateway":
            # Without a load balancer its address is the Service's own.
            each["metadata"]["annotations"] = {"networking.istio.io/address-type": "IPAddress"}
            objects += gateway(control, name)
        elif each["kind"] == "Service":
            objects.append(_tls_to_picker(name))
    return objects


def gateway(control: Istiod, name: str) -> list[Object]:
    """Service and pod of the Gateway `name`."""
    labels = {GATEWAY_LABEL: name}
    configuration = bootstrap(control, INFRA, name, address("0.0.0.0", _ADMIN))
    container = {
        "name": "envoy",
        "image": node_images.ENVOY,
        "args": [
            *("-c", "/etc/envoy/envoy.json", "--concurrency", "1"),
            *("--service-node", node_id("$(POD_IP)", INFRA, name)),
        ],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": _ADMIN}, "periodSeconds": 1},
        "volumeMounts": [{"name": "envoy", "mountPath": "/etc/envoy"}],
    }
    pod = {
        # Port 80 is opened without root.
        "securityContext": {
            "sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]
        },
        "containers": [container],
        "volumes": [{"name": "envoy", "configMap": {"name": name}}],
    }
    port = {"name": "http", "port": 80, "appProtocol": "http"}
    service = {"selector": labels, "ports": [port]}
    return [
        _object("v1", "ConfigMap", name, INFRA, data={"envoy.json": json.dumps(configuration)}),
        _object("v1", "Pod", name, INFRA, labels, spec=pod),
        _object("v1", "Service", f"{name}-istio", INFRA, spec=service),
    ]


def _with_our_images(each: Object) -> Object:
    """`each` with images that the node has, if it is a Deployment."""
    if each["kind"] != "Deployment":
        return each
    pod = each["spec"]["template"]["spec"]
    # Nothing is under way when the suite has ended.
    pod["terminationGracePeriodSeconds"] = 1
    for container in pod["containers"]:
        if container["name"] == "epp":
            container["image"] = _EPP_IMAGE
            container["args"].append("--metrics-endpoint-auth=false")
            container["args"].append(f"--config-text={json.dumps(_CONFIGURATION)}")
        else:
            container["image"] = ECHO_IMAGE
    return each


def _tls_to_picker(service: str) -> Object:
    """As in examples/gateways/istio.yaml: pickers serve TLS with a certificate of their own."""
    host = f"{service}.{BACKEND}.svc.cluster.local"
    policy = {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}}
    spec = {"host": host, "trafficPolicy": policy}
    return _object("networking.istio.io/v1", "DestinationRule", service, BACKEND, spec=spec)


def _object(
    api: str,
    kind: str,
    name: str,
    namespace: str,
    labels: Mapping[str, str] | None = None,
    **parts: object,
) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": dict(labels or {})}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **parts}
