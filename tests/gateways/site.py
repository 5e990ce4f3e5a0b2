"""A model's pods and its EPP, as processes with addresses of their own and objects in a cluster.

The API server has Pods with these addresses, so that the EPP and gateways discover them. It accepts
no loopback address in an EndpointSlice, so the addresses are of a network that the kernel takes as
local for the time of the test; this needs root.
"""

import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from tandem_contract import ports
from tests.cluster.control_plane import ControlPlane
from tests.epp.real import Epp, epp
from tests.sidecar.processes import Sidecar, sidecar
from tests.sidecar.real.engine import Engine, engines

MANIFESTS: Final = Path(__file__).parents[2] / "examples/gateways"
APP: Final = {"app": "llama"}
EPP_LABELS: Final = {"app": "llama-epp"}
_NODE: Final = "here"
_PODS: Final = "172.30.0.0/16"
_ROUTER: Final = """
disaggregated_serving: {enabled: true}
plugins:
- type: prefix-cache-scorer
- type: queue-scorer
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 32}}
"""


def manifest(name: str) -> list[Any]:
    """The objects of a file in examples/gateways."""
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


@dataclass
class Site:
    """The running pods of one model."""

    namespace: str
    cluster: ControlPlane
    addresses: Mapping[str, str]
    """Pod name → address."""
    prefill: Engine
    decode: Mapping[str, tuple[Engine, Sidecar]]

    def apply(self, *objects: Any) -> None:
        """Create or change objects in the site's namespace."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.cluster.kubectl(
            *("apply", "--server-side", f"--namespace={self.namespace}", "--filename=-"),
            input=listed,
        )

    def publish(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a pod object: ready, at the address of `name`."""
        container = {"name": "engine", "image": "none"}
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": dict(labels)},
                "spec": {"containers": [container], "nodeName": _NODE},
            }
        )
        self.report(name, ready=True)

    def report(self, name: str, *, ready: bool) -> None:
        """Write the pod's status, as a kubelet does."""
        status = {
            "phase": "Running",
            "podIP": self.addresses[name],
            "podIPs": [{"ip": self.addresses[name]}],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        self.cluster.kubectl(
            *("patch", "pod", name, f"--namespace={self.namespace}", "--subresource=status"),
            *("--type=merge", f"--patch={json.dumps({'status': status})}"),
        )

    @asynccontextmanager
    async def picker(self, folder: Path) -> AsyncIterator[Epp]:
        """The EPP on its own address, with the arguments of its Deployment; ready."""
        config = folder / "router.yaml"
        config.write_text(_ROUTER)
        self.publish("epp-0", EPP_LABELS)
        (deployment,) = (each for each in manifest("epp") if each["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        arguments = [each.replace("$(NAMESPACE)", self.namespace) for each in container["args"]]
        # `epp` names the file itself.
        arguments.remove("--config-file=/config/router.yaml")
        arguments.append(f"--listen={self.addresses['epp-0']}:{ports.EPP_GRPC}")
        arguments.append("--drain-timeout=0s")
        async with epp(config, *arguments, KUBECONFIG=str(self.cluster.kubeconfig)) as running:
            yield running


@contextmanager
def local_network() -> Iterator[str]:
    """The first three numbers of a network whose addresses are all this machine's own."""
    network = f"172.30.{Random().randrange(1, 250)}"
    route = ("local", f"{network}.0/24", "dev", "lo")
    subprocess.run(["ip", "route", "add", *route], check=True)
    try:
        yield network
    finally:
        subprocess.run(["ip", "route", "del", *route], check=True)


@asynccontextmanager
async def site(
    cluster: ControlPlane, namespace: str, network: str, folder: Path
) -> AsyncIterator[Site]:
    """One prefill pod and two decode pods of the reference engine, ready, in `namespace`."""
    names = ("epp-0", "prefill-0", "decode-0", "decode-1")
    addresses = {name: f"{network}.{number}" for number, name in enumerate(names, start=1)}
    run = engines(folder, prefill={}, first={"role": "kv_consumer"}, second={"role": "kv_consumer"})
    prefill, first, second = run
    prefill.host = addresses["prefill-0"]
    async with AsyncExitStack() as stack:
        for engine in run:
            stack.callback(engine.kill)
            await engine.up()
        decode = {}
        for name, engine in (("decode-0", first), ("decode-1", second)):
            flags = ("--engine", engine.url, "--prefill-allow", _PODS, "--pod-name", name)
            listen = ("--listen", f"{addresses[name]}:{ports.SIDECAR}")
            decode[name] = (engine, await stack.enter_async_context(sidecar(*flags, *listen)))
        model = Site(namespace, cluster, addresses, prefill, decode)
        # The controller of EndpointSlices leaves out pods of a node that does not exist.
        model.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": _NODE}})
        stack.callback(cluster.kubectl, "delete", "node", _NODE)
        model.publish("prefill-0", {**APP, "llm-d.ai/role": "prefill"})
        for name in decode:
            model.publish(name, {**APP, "llm-d.ai/role": "decode"})
        yield model
