"""A whole single-node Kubernetes on this machine: `up`, `down`, and reaching it in between.

The control plane listens on the host's end of a pair of interfaces; containerd, kubelet,
kube-proxy and all pods live at the other end, in namespaces that die with one process. All state
lies in `${TANDEM_CLUSTER_CACHE}/node`, of which `down` leaves the logs. There is one per machine.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import components, detached, host, kubectl, network, node_config, node_images, pki, tools
from .control_plane import DidNotStart

NAME = "tandem-node"
_PORT, _ETCD, _ETCD_PEER = 6443, 24379, 24380
_URL = f"https://{network.HOST_IP}:{_PORT}"
_START_SECONDS = 180
Say = Callable[[str], None]


class CannotStart(Exception):
    """This machine cannot run the node; the message says why."""


class Node:
    """The node of this machine, running or not."""

    def __init__(self) -> None:
        self.state = tools.cache() / "node"
        self.kubeconfig = self.state / "admin.kubeconfig"
        self.logs = self.state / "log"
        self.helm_path = tools.cache() / "bin/helm"

    def is_up(self) -> bool:
        return detached.find(self._record("node")) is not None

    def up(self, say: Say) -> None:
        """Start it and wait until it takes pods. Raises MissingTool, CannotStart, DidNotStart."""
        if self.is_up():
            return
        _require_root()
        tools.ensure_packages(tools.NODE_PACKAGES, say)
        tools.ensure(tools.NODE, say)
        self.down()
        if host.runs_a_kubelet():
            raise CannotStart("a kubelet runs on this machine already: its pods would be disturbed")
        began = time.monotonic()
        try:
            self._start()
        except BaseException:
            self.down()
            raise
        say(f"node ready after {time.monotonic() - began:.0f} s")

    def down(self) -> None:
        """Stop it and remove what it made but for the logs; nothing when there is nothing."""
        if not self.state.exists():
            return
        for name in ("node", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            detached.kill(self._record(name))
        network.remove()
        host.restore(self.state / "host.json")
        for entry in self.state.iterdir():
            if entry != self.logs:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """kubectl's stdout, as administrator. Raises kubectl.Failed."""
        return kubectl.run(self.kubeconfig, *arguments, input=input)

    def helm(self, *arguments: str) -> str:
        """helm's stdout, as administrator. Raises CalledProcessError."""
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig)}
        return subprocess.run(
            [str(self.helm_path), *arguments],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def load_image(self, archive: Path) -> None:
        """Import an OCI archive; it says its image's name. Raises CalledProcessError."""
        program = str(tools.cache() / "bin/ctr")
        self.inside(program, "--namespace=k8s.io", "images", "import", str(archive.resolve()))

    def inside(self, *command: str) -> str:
        """The stdout of a command run in the node's namespaces. Raises CalledProcessError."""
        starter = detached.find(self._record("node"))
        first = starter and detached.child(starter)
        enter = ["nsenter", f"--target={first}", "--mount", "--net", "--pid", "--uts", "--ipc"]
        done = subprocess.run([*enter, *command], check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def show_gpus(self, count: int) -> None:
        """Let the node offer `nvidia.com/gpu`, as with a device plugin that hands out nothing."""
        amounts = f'{{"nvidia.com/gpu":"{count}"}}'
        patch = f'{{"status":{{"capacity":{amounts},"allocatable":{amounts}}}}}'
        self.kubectl("patch", "node", NAME, "--subresource=status", f"--patch={patch}")

    def describe(self) -> str:
        """Pods and events, for who reads a failed run."""
        everywhere = "--all-namespaces"
        pods = self.kubectl("get", "pods", everywhere, "--output=wide")
        events = self.kubectl("get", "events", everywhere, "--sort-by=.lastTimestamp")
        return f"{pods}\n{events}\nlogs: {self.logs}"

    def _start(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)
        for name in ("log", "pid", "containerd", "kubelet", "cni"):
            (self.state / name).mkdir(parents=True)
        issued = self._issue()
        host.remember(self.state / "host.json")
        try:
            network.create(components.SERVICE_RANGE)
        except subprocess.CalledProcessError as refused:
            raise CannotStart(f"no network namespace can be made here: {refused}") from refused
        self._start_control_plane(issued)
        self._start_node(issued)
        self._start_dns()

    def _issue(self) -> pki.Authority:
        issued = pki.Authority(self.state / "pki")
        hosts = (*components.API_NAMES, f"IP:{network.HOST_IP}")
        issued.issue("apiserver", "kube-apiserver", hosts=hosts)
        issued.issue("front-proxy", "front-proxy-client")
        issued.issue("apiserver-kubelet", "kube-apiserver-kubelet", groups=["system:masters"])
        issued.issue("admin", "admin", groups=["system:masters"])
        for name in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            issued.issue(name, f"system:{name}")
        address = f"IP:{network.NODE_IP}"
        issued.issue("kubelet", f"system:node:{NAME}", groups=["system:nodes"], hosts=[address])
        for name in ("admin", "kubelet", "kube-proxy", "kube-scheduler", "kube-controller-manager"):
            pki.write(self.state / f"{name}.kubeconfig", issued.kubeconfig(name, _URL))
        return issued

    def _start_control_plane(self, issued: pki.Authority) -> None:
        local = "127.0.0.1"
        self._launch("etcd", components.etcd(self.state / "etcd", local, _ETCD, _ETCD_PEER))
        flags = components.api_server(
            issued,
            f"http://{local}:{_ETCD}",
            network.HOST_IP,
            _PORT,
            enable_admission_plugins="NodeRestriction",
            kubelet_client_certificate=issued.certificate("apiserver-kubelet"),
            kubelet_client_key=issued.key("apiserver-kubelet"),
            kubelet_preferred_address_types="InternalIP",
            requestheader_client_ca_file=issued.certificate("ca"),
            requestheader_allowed_names="front-proxy-client",
            requestheader_username_headers="X-Remote-User",
            requestheader_group_headers="X-Remote-Group",
            requestheader_extra_headers_prefix="X-Remote-Extra-",
            proxy_client_cert_file=issued.certificate("front-proxy"),
            proxy_client_key_file=issued.key("front-proxy"),
            enable_aggregator_routing="true",
        )
        self._launch("kube-apiserver", flags)
        self._until("kube-apiserver", "get", "--raw=/readyz")
        name = "kube-controller-manager"
        self._launch(name, components.controllers(issued, self.state / f"{name}.kubeconfig"))
        self._launch(
            "kube-scheduler", components.scheduler(self.state / "kube-scheduler.kubeconfig")
        )

    def _start_node(self, issued: pki.Authority) -> None:
        state = self.state
        node_images.write(state / "images")
        pki.write(state / "kubelet.json", node_config.kubelet(issued, state))
        proxy = node_config.kube_proxy(state / "kube-proxy.kubeconfig", NAME)
        pki.write(state / "kube-proxy.json", proxy)
        pki.write(state / "cni/bridge.conflist", node_config.cni())
        # Pods are to ask nobody outside.
        (state / "resolv.conf").write_text("")
        containerd = node_config.template("containerd.toml", state=state, pause=node_images.PAUSE)
        (state / "containerd.toml").write_text(containerd)
        self.kubectl(
            *("create", "clusterrolebinding", "test-kube-proxy"),
            *("--clusterrole=system:node-proxier", "--user=system:kube-proxy"),
        )
        detached.start(
            self._record("node"),
            [
                *("nsenter", f"--net=/run/netns/{network.NAMESPACE}"),
                *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"),
                *("--kill-child", "--mount-proc", "sh"),
                str(node_config.run_script()),
            ],
            log=self.logs / "node.log",
            env={
                "STATE": str(state),
                "BIN": str(tools.cache() / "bin"),
                "NODE": NAME,
                "NODE_IP": network.NODE_IP,
            },
        )
        self._until("node", "wait", "--for=condition=Ready", f"node/{NAME}", "--timeout=5s")
        self._until("node", "get", "serviceaccount", "default")

    def _start_dns(self) -> None:
        dns = node_config.template(
            "dns.yaml", coredns=node_images.COREDNS, dns_ip=node_config.DNS_IP
        )
        self.kubectl("apply", "--filename=-", input=dns)
        system = "--namespace=kube-system"
        self._until("node", "rollout", "status", "deployment/coredns", system, "--timeout=60s")

    def _launch(self, name: str, flags: list[str]) -> None:
        command = [tools.path(name), *flags]
        detached.start(self._record(name), command, log=self.logs / f"{name}.log")

    def _until(self, name: str, *question: str) -> None:
        """Wait until kubectl agrees to `question`. Raises DidNotStart, also when `name` ended."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.kubectl(*question)
                return
            except kubectl.Failed as refused:
                ended = detached.find(self._record(name)) is None
                if ended or time.monotonic() > deadline:
                    state = "ended" if ended else "runs"
                    raise DidNotStart(f"{refused}; {name} {state}, see {self.logs}") from refused
            time.sleep(0.1)

    def _record(self, name: str) -> Path:
        return self.state / "pid" / name


def _require_root() -> None:
    if os.geteuid() != 0:
        raise CannotStart("the node makes namespaces and interfaces: run this as root")
