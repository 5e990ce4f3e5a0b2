"""The flags of the control plane's programs, the same for both sizes of cluster."""

from collections.abc import Mapping
from pathlib import Path

from .pki import Authority

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc"
API_NAMES = (
    *("IP:127.0.0.1", "IP:10.96.0.1", "DNS:localhost", "DNS:kubernetes"),
    *("DNS:kubernetes.default", "DNS:kubernetes.default.svc"),
    "DNS:kubernetes.default.svc.cluster.local",
)

_NO_NODES = "-node-lifecycle-controller,-pod-garbage-collector-controller"
"""Without kubelets the one would declare every node lost, and the pods there not ready; the other
deletes pods of nodes that do not exist, all of them at once, some 40 s after it has seen one."""


def etcd(data: Path, host: str, client: int, peer: int) -> list[str]:
    return _flags(
        {
            "data-dir": data,
            "listen-client-urls": f"http://{host}:{client}",
            "advertise-client-urls": f"http://{host}:{client}",
            "listen-peer-urls": f"http://{host}:{peer}",
            # The data is thrown away afterwards and need not survive a power cut.
            "unsafe-no-fsync": "true",
        }
    )


def api_server(issued: Authority, etcd_url: str, host: str, port: int, **more: object) -> list[str]:
    """`issued` must have a certificate called apiserver. `more` are flags, with `_` for `-`."""
    return _flags(
        {
            "etcd-servers": etcd_url,
            "bind-address": host,
            "advertise-address": host,
            "secure-port": port,
            "tls-cert-file": issued.certificate("apiserver"),
            "tls-private-key-file": issued.key("apiserver"),
            "client-ca-file": issued.certificate("ca"),
            "service-account-issuer": SERVICE_ACCOUNT_ISSUER,
            "service-account-key-file": issued.service_account_public,
            "service-account-signing-key-file": issued.key("sa"),
            "service-cluster-ip-range": SERVICE_RANGE,
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",
        }
        | more
    )


def controllers(issued: Authority, kubeconfig: Path, *, is_nodeless: bool = False) -> list[str]:
    """`is_nodeless`: whether nodes are only objects that tests create."""
    return _flags(
        {
            "kubeconfig": kubeconfig,
            "secure-port": 0,
            "leader-elect": "false",
            "controllers": f"*,{_NO_NODES}" if is_nodeless else "*",
            "use-service-account-credentials": "true",
            # 15 s by default, for which a new autoscaler waits, too.
            "horizontal-pod-autoscaler-sync-period": "1s",
            "root-ca-file": issued.certificate("ca"),
            "service-account-private-key-file": issued.key("sa"),
            "cluster-signing-cert-file": issued.certificate("ca"),
            "cluster-signing-key-file": issued.key("ca"),
        }
    )


def scheduler(kubeconfig: Path) -> list[str]:
    return _flags({"kubeconfig": kubeconfig, "secure-port": 0, "leader-elect": "false"})


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
