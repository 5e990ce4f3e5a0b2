"""The node's configuration files, as documents."""

import string
from pathlib import Path
from typing import Any

from . import network
from .pki import Authority

_FILES = Path(__file__).parent / "node_files"
DNS_IP = "10.96.0.10"


def template(name: str, **values: object) -> str:
    """The file `name` of node_files with `$value` filled in."""
    return string.Template((_FILES / name).read_text()).substitute(values)


def run_script() -> Path:
    return _FILES / "run.sh"


def kubelet(issued: Authority, state: Path) -> dict[str, Any]:
    """KubeletConfiguration; `issued` must have a certificate called kubelet."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Without this, kubelet refuses to start on machines with cgroup v1.
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(issued.certificate("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(issued.certificate("kubelet")),
        "tlsPrivateKeyFile": str(issued.key("kubelet")),
        "clusterDNS": [DNS_IP],
        "clusterDomain": "cluster.local",
        "resolvConf": str(state / "resolv.conf"),
        "address": network.NODE_IP,
        "healthzBindAddress": "127.0.0.1",
        # The disk may be nearly full, and no registry could supply collected images again.
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "maxPods": 200,
        "podLogsDir": "/var/log/pods",
        # How soon pods see that a mounted Secret or an annotation has changed; a minute by default.
        "syncFrequency": "10s",
    }


def kube_proxy(kubeconfig: Path, node: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "bindAddress": "0.0.0.0",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": network.POD_RANGE,
        "detectLocalMode": "ClusterCIDR",
        "hostnameOverride": node,
        # The conntrack limit belongs to the whole machine: leave it unchanged.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }


def cni() -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": network.POD_RANGE}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-ipam",
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        # Lets a pod reach itself through its own Service.
        "hairpinMode": True,
        "ipam": addresses,
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "bridge", "plugins": [bridge, portmap]}
