"""A single-node Kubernetes on this machine; one at a time.

The control plane listens on the host's end of a veth pair. containerd, kubelet, kube-proxy and all
pods run at the other end, in namespaces that end with the node's first process. All state is in
`${TANDEM_CLUSTER_CACHE}/node`; `down` deletes it except for the logs.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import (
    components,
    detached,
    host_settings,
    kubectl,
    network,
    node_config,
    node_images,
    pki,
    tools,
)
from .control_plane import DidNotStart

NAME = "tandem-node"
_PORT, _ETCD, _ETCD_PEER = 6443, 24379, 24380
_URL = f"https://{network.HOST_IP}:{_PORT}"
_START_SECONDS = 180
Say = Callable[[str], None]


class CannotStart(Exception):
    """This machine cannot run the node; the message says why."""


class Node:
    """The node of this machine; it may be stopped."""

    def __init__(self) -> None:
        self.state = tools.cache() / "node"
        self.kubeconfig = self.state / "admin.kubeconfig"
        self.logs = self.state / "log"
        self.helm_path = tools.cache() / "bin/helm"

    def is_up(self) -> bool:
        return detached.find(self._record("node")) is not None

    def up(self, say: Say) -> None:
        """Start the node and wait until it accepts pods.

        Builds and installs missing programs. Raises MissingTool, CannotStart, DidNotStart.
        """
        if self.is_up():
            return
        _require_root()
        tools.ensure_packages(tools.NODE_PACKAGES, say)
        tools.ensure(tools.NODE, say)
        self.down()
        if host_settings.runs_a_kubelet():
            raise CannotStart("a kubelet already runs here; a second one would disturb its pods")
        start = time.monotonic()
        try:
            self._start()
        except BaseException:
            self.down()
            raise
        say(f"node ready after {time.monotonic() - start:.0f} s")

    def down(self) -> None:
        """Stop the node and delete its state except the logs; nothing without state."""
        if not self.state.exists():
            return
        for name in ("node", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            detached.kill(self._record(name))
        network.remove()
        host_settings.restore(self.state / "host.json")
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

    def delete_namespaces(self, *names: str) -> None:
        """Delete the namespaces with all that they contain, without the time that pods may take to
        drain."""
        deleted = ("delete", "namespace", "--ignore-not-found", *names)
        self.kubectl(*deleted, "--wait=false")
        for name in names:
            # None is created again in a namespace that is being deleted.
            self.kubectl("delete", "pods", "--all", "--grace-period=1", f"--namespace={name}")
        self.kubectl(*deleted)

    def load_image(self, archive: Path) -> None:
        """Import an OCI archive under the image name in it. Raises CalledProcessError."""
        program = str(tools.cache() / "bin/ctr")
        self.inside(program, "--namespace=k8s.io", "images", "import", str(archive.resolve()))

    def inside(self, *command: str) -> str:
        """The stdout of a command run in the node's namespaces. Raises CalledProcessError."""
        enter = self._enter("--mount", "--net", "--pid", "--uts", "--ipc")
        done = subprocess.run([*enter, *command], check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    @contextmanager
    def running(self, *command: str) -> Iterator[None]:
        """Run a program in the node's network and mounts until the block ends; its log is in
        `logs`. Raises DidNotStart when it has ended before."""
        log = self.logs / f"{Path(command[0]).name}.log"
        # In a process namespace of its own, nsenter would stay between us and the program.
        enter = self._enter("--mount", "--net")
        with (
            log.open("w") as out,
            subprocess.Popen(
                [*enter, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            ) as process,
        ):
            try:
                yield
                if process.poll() is not None:
                    raise DidNotStart(f"{command[0]} ended with {process.returncode}, see {log}")
            finally:
                process.terminate()

    def _enter(self, *namespaces: str) -> list[str]:
        starter = detached.find(self._record("node"))
        first = starter and detached.child(starter)
        return ["nsenter", f"--target={first}", *namespaces]

    def show_gpus(self, count: int) -> None:
        """Make the node report `count` `nvidia.com/gpu`, without a device plugin behind them."""
        amounts = f'{{"nvidia.com/gpu":"{count}"}}'
        patch = f'{{"status":{{"capacity":{amounts},"allocatable":{amounts}}}}}'
        self.kubectl("patch", "node", NAME, "--subresource=status", f"--patch={patch}")

    def describe(self) -> str:
        """All pods and events and the folder of the logs, for diagnosing a failed run."""
        everywhere = "--all-namespaces"
        pods = self.kubectl("get", "pods", everywhere, "--output=wide")
        events = self.kubectl("get", "events", everywhere, "--sort-by=.lastTimestamp")
        return f"{pods}\n{events}\nlogs: {self.logs}"

    def _start(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)
        for name in ("log", "pid", "containerd", "kubelet", "cni"):
            (self.state / name).mkdir(parents=True)
        issued = self._issue()
        host_settings.save(self.state / "host.json")
        try:
            network.create(components.SERVICE_RANGE)
        except subprocess.CalledProcessError as refused:
            raise CannotStart(f"cannot create a network namespace: {refused}") from refused
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
        # No nameserver: lookups of pods never leave the node.
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

    def _until(self, name: str, *arguments: str) -> None:
        """Retry kubectl `arguments` until it succeeds.

        Raises DidNotStart after _START_SECONDS, or when the process `name` has ended.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.kubectl(*arguments)
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
        raise CannotStart(
            "only root can create the node's namespaces and interfaces: run this as root"
        )
