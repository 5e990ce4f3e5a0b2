"""The installation that tests on the node share: the Helm release, its pools, its addresses."""

import json
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem_contract import labels
from tests.cluster.kubectl import Failed
from tests.cluster.node import Node

from .client import Stream

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "charts/tandem")
QUICKSTART = str(ROOT / "examples/quickstart.yaml")
RELEASE, SYSTEM, TEAM = "tandem", "tandem-system", "team-a"
SECONDS = 180
"""How long tests wait for anything on the node."""


class Site:
    """The Helm release and the pools, managed as an administrator would."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def kubectl(self, *arguments: str, namespace: str = TEAM) -> str:
        return self.node.kubectl(*arguments, f"--namespace={namespace}")

    def helm(self, *arguments: str) -> str:
        return self.node.helm(*arguments, f"--namespace={SYSTEM}")

    def get(self, *arguments: str, namespace: str = TEAM) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json", namespace=namespace))

    def install(self) -> None:
        for name in (SYSTEM, TEAM):
            self.node.kubectl("create", "namespace", name)
            enforced = "pod-security.kubernetes.io/enforce=restricted"
            self.node.kubectl("label", "namespace", name, enforced)
        self.helm("install", RELEASE, CHART, "--wait", f"--timeout={SECONDS}s")

    def clear(self) -> None:
        """Remove the release, the pools, the namespaces and the CRDs, as far as they exist."""
        if "tandem.dev" in self.node.kubectl("api-versions"):
            pools = ("delete", "decodepools,prefillpools", "--all", "--all-namespaces")
            self.node.kubectl(*pools)
        self.helm("uninstall", RELEASE, "--ignore-not-found")
        self.node.kubectl("delete", "namespace", TEAM, SYSTEM, "--ignore-not-found")
        self.node.kubectl("delete", "--ignore-not-found", f"--filename={ROOT / 'crds'}")

    def ready(self) -> None:
        self.wait_until_ready("prefillpool/quickstart-prefill", "decodepool/quickstart")

    def wait_until_ready(self, *pools: str) -> None:
        """Raises Failed with what the pools and their pods say."""
        try:
            self.kubectl("wait", "--for=condition=Ready", f"--timeout={SECONDS}s", *pools)
        except Failed as err:
            conditions = "--output=jsonpath={range .items[*]}{.status.conditions}{'\\n'}{end}"
            err.add_note(self.kubectl("get", *pools, conditions))
            err.add_note(self.kubectl("describe", "pods"))
            raise

    def scale_operator(self, replicas: int) -> None:
        """Scale the operator's Deployment; returns once the pods are gone or available."""
        self.kubectl("scale", "deployment/tandem", f"--replicas={replicas}", namespace=SYSTEM)
        if replicas:
            self._wait("--for=condition=Available", "deployment/tandem")
        else:
            self._wait("--for=delete", "pod", "--selector=app.kubernetes.io/component=operator")

    def _wait(self, *arguments: str) -> None:
        self.kubectl("wait", *arguments, f"--timeout={SECONDS}s", namespace=SYSTEM)

    def pods(self, selector: str) -> dict[str, str]:
        """Pod name → uid, without pods that are being deleted."""
        return {
            pod["metadata"]["name"]: pod["metadata"]["uid"]
            for pod in self.get("pods", f"--selector={selector}")["items"]
            if "deletionTimestamp" not in pod["metadata"]
        }

    @property
    def engines(self) -> dict[str, str]:
        return self.pods(labels.POOL)

    @property
    def address(self) -> str:
        """`host:port` of the quickstart's Envoy, reachable from this machine."""
        return self.envoy("quickstart")

    def envoy(self, endpoint: str) -> str:
        """`host:port` of the Service of an endpoint's Envoy."""
        service = self.get("service", endpoint)["spec"]
        return f"{service['clusterIP']}:{service['ports'][0]['port']}"

    def is_reachable(self, endpoint: str = "quickstart") -> bool:
        """Whether kube-proxy has set up Envoy's Service: until then packets to it are lost, also
        those that a connection begun too early sends again."""
        host, port = self.envoy(endpoint).split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def prefill_address(self) -> str:
        (pod,) = self.get("pods", f"--selector={labels.ROLE}=prefill")["items"]
        return f"{pod['status']['podIP']}:8000"

    def streams(self, count: int, tokens: int) -> list[Stream]:
        """Start `count` long streams over all decode pods; returns once each has begun."""
        address = self.address
        streams = [Stream(address, prompt(), tokens).start() for _ in range(count)]
        assert all(stream.begun.wait(SECONDS) for stream in streams)
        return streams


def prompt(words: int = 600) -> str:
    """A new prompt at each call, long enough for a hand-off."""
    return " ".join(uuid.uuid4().hex[:6] for _ in range(words // 6))


def until(holds: Callable[[], bool], event: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited {SECONDS} s for: {event}"
        time.sleep(0.2)
