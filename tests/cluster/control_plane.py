"""etcd, kube-apiserver and kube-controller-manager as children of this process.

    with ControlPlane.running(folder) as cluster:
        cluster.kubectl("get", "namespaces")

All files are in `folder`, all ports are on loopback, and no process outlives this one.
"""

import base64
import functools
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem_local.ports import free_port

from . import components, kubectl, pki, tools

HOST = "127.0.0.1"
_START_SECONDS = 90
_START_TRIES = 3
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


class DidNotStart(Exception):
    """A process ended or did not become ready; the message holds the end of its log."""


class ControlPlane:
    """A running control plane. `audit_log` has one JSON event per line, without bodies."""

    def __init__(self, folder: Path, api_flags: Mapping[str, object] | None = None) -> None:
        """`api_flags`: more flags of kube-apiserver, with `_` for `-`."""
        self._folder = folder
        self._more_api_flags = dict(api_flags or {})
        self._ports = [free_port(HOST) for _ in range(3)]
        self._authority = pki.Authority(folder / "pki")
        self._servers: list[subprocess.Popen[bytes]] = []
        """etcd, then the API server."""
        self._controllers: subprocess.Popen[bytes] | None = None
        self.url = f"https://{HOST}:{self._ports[0]}"
        self.audit_log = folder / "audit.jsonl"
        self._authority.issue("apiserver", "kube-apiserver", hosts=components.API_NAMES)
        self.kubeconfig = self.kubeconfig_for("admin", groups=("system:masters",))

    @classmethod
    @contextmanager
    def running(
        cls, folder: Path, api_flags: Mapping[str, object] | None = None
    ) -> Iterator["ControlPlane"]:
        """Start a control plane in `folder`, stop it at the end.

        Raises tools.MissingTool, DidNotStart.
        """
        for attempt in range(_START_TRIES):
            with ExitStack() as started:
                cluster = cls(folder / str(attempt), api_flags)
                try:
                    cluster._start(started)
                except DidNotStart:
                    # Another process may have taken a chosen port in the meantime: try others.
                    if attempt + 1 == _START_TRIES:
                        raise
                    continue
                yield cluster
                return

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """kubectl's stdout, as administrator. Raises kubectl.Failed."""
        return kubectl.run(self.kubeconfig, *arguments, input=input)

    def request(self, method: str, path: str, body: object = None) -> Any:
        """The API server's answer to the administrator, in a tenth of kubectl's CPU time.

        `path` begins with `/`. Raises HTTPError for a refusal, OSError without an answer.
        """
        return json.loads(self._answer(method, path, body))

    def serves(self, path: str) -> bool:
        """Whether the API server answers the administrator's GET with success."""
        try:
            self._answer("GET", path)
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False
        except OSError:
            return False
        return True

    def wait_until_established(self, *definitions: str) -> None:
        """Wait until the API server serves the kinds of CustomResourceDefinitions.

        `definitions` select them, as arguments of kubectl. Raises kubectl.Failed after a minute.
        """
        kubectl.wait_until_established(self.kubeconfig, *definitions)

    def kubeconfig_for(self, user: str, *, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig with a client certificate for `user`; RBAC limits what it may do."""
        name = user.replace(":", "-").replace("/", "-")
        self._authority.issue(name, user, groups=groups)
        path = self._folder / f"{name}.kubeconfig"
        return pki.write(path, self._authority.kubeconfig(name, self.url))

    def kubeconfig_for_service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a token of an existing service account, valid for an hour."""
        token = self.kubectl("create", "token", name, f"--namespace={namespace}").strip()
        path = self._folder / f"{namespace}-{name}.kubeconfig"
        document = self._authority.kubeconfig(name, self.url, token=token)
        return pki.write(path, document)

    def restart_controllers(self) -> None:
        """Make the garbage collector find new kinds now; it looks for them only twice a minute."""
        self._stop_controllers()
        self._controllers = self._launch("kube-controller-manager", *self._controller_flags())
        self._until("kube-controller-manager", self._controllers, self._controllers_are_active)

    def backup(self) -> None:
        """Keep etcd's present state for `restore`; restarts etcd and the API server."""
        self._stop_servers()
        shutil.copytree(self._folder / "etcd", self._folder / "backup", dirs_exist_ok=True)
        self._start_servers()

    def restore(self, *, bumped_by: int = 0) -> None:
        """Bring etcd back to the state of `backup`; restarts etcd and the API server.

        `bumped_by`: how many revisions etcd is advanced, as `etcdutl snapshot restore
        --bump-revision` does.
        """
        self._stop_servers()
        shutil.rmtree(self._folder / "etcd")
        shutil.copytree(self._folder / "backup", self._folder / "etcd")
        self._start_servers(bumped_by)

    def _start(self, started: ExitStack) -> None:
        started.callback(self._stop_servers)
        self._start_servers()
        started.callback(self._stop_controllers)
        self.restart_controllers()

    def _start_servers(self, bumped_by: int = 0) -> None:
        etcd = self._launch("etcd", *self._etcd_flags())
        self._servers.append(etcd)
        self._until("etcd", etcd, lambda: _is_listening(self._ports[1]))
        for _ in range(bumped_by):
            self._put_in_etcd(b"bump")
        api = self._launch("kube-apiserver", *self._api_flags())
        self._servers.append(api)
        self._until("kube-apiserver", api, lambda: self.serves("/readyz"))

    def _stop_servers(self) -> None:
        while self._servers:
            _stop(self._servers.pop())

    def _put_in_etcd(self, key: bytes) -> None:
        """Write a key that no API server reads, by etcd's JSON gateway."""
        body = json.dumps({"key": base64.b64encode(key).decode(), "value": ""}).encode()
        url = f"http://{HOST}:{self._ports[1]}/v3/kv/put"
        urllib.request.urlopen(url, body, timeout=10).close()

    def _stop_controllers(self) -> None:
        if self._controllers is not None:
            _stop(self._controllers)

    def _etcd_flags(self) -> list[str]:
        return components.etcd(self._folder / "etcd", HOST, *self._ports[1:])

    def _api_flags(self) -> list[str]:
        policy = pki.write(self._folder / "audit-policy.json", _AUDIT_POLICY)
        return components.api_server(
            self._authority,
            f"http://{HOST}:{self._ports[1]}",
            HOST,
            self._ports[0],
            audit_policy_file=policy,
            audit_log_path=self.audit_log,
            # Megabytes. Rotation would remove events that a test still reads.
            audit_log_maxsize=10000,
            # As on OpenShift.
            enable_admission_plugins="OwnerReferencesPermissionEnforcement",
            **self._more_api_flags,
        )

    def _controller_flags(self) -> list[str]:
        kubeconfig = self.kubeconfig_for("system:kube-controller-manager")
        return components.controllers(self._authority, kubeconfig, is_nodeless=True)

    def _launch(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                # The kernel kills the child when this process ends for any reason.
                ["setpriv", "--pdeathsig=KILL", tools.path(name), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                process_group=0,
            )

    def _answer(self, method: str, path: str, body: object = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with self._administrator.open(request, timeout=30) as answer:
            return bytes(answer.read())

    @functools.cached_property
    def _administrator(self) -> urllib.request.OpenerDirector:
        issued = self._authority
        context = ssl.create_default_context(cafile=issued.certificate("ca"))
        context.load_cert_chain(issued.certificate("admin"), issued.key("admin"))
        # As kubectl, it asks no proxy for an address of this machine.
        direct = urllib.request.ProxyHandler({})
        return urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))

    def _controllers_are_active(self) -> bool:
        """Whether the default service account exists; a namespace without it accepts no pod."""
        return self.serves("/api/v1/namespaces/default/serviceaccounts/default")

    def _until(
        self, name: str, process: subprocess.Popen[bytes], condition: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DidNotStart(self._failure(name, process))
            time.sleep(0.05)

    def _failure(self, name: str, process: subprocess.Popen[bytes]) -> str:
        log = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
        problem = (
            "does not answer" if process.returncode is None else f"ended: {process.returncode}"
        )
        return "\n".join([f"{name} {problem}", *log[-10:]])


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kill the process; its state is thrown away, so no clean shutdown is needed."""
    process.kill()
    process.wait()
