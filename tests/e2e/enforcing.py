"""NetworkPolicies enforced on the node by kube-router, which runs for policies alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster import components, tools
from tests.cluster.node import NAME, Node

_FLAGS = (
    *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
    # No server for health checks: its port could be in use.
    "--health-port=0",
    f"--hostname-override={NAME}",
    f"--service-cluster-ip-range={components.SERVICE_RANGE}",
)
_CHAINS = ("KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT")
"""Through these the packets of all pods get to the rules of kube-router."""


@contextmanager
def enforced(node: Node) -> Iterator[None]:
    """Run kube-router until the block ends, for the pods and policies of now and later.

    It takes effect within seconds: wait for what is forbidden to fail. Connections that are open
    stay so until `forget_connections`.
    """
    program = str(tools.path("kube-router"))
    try:
        with node.running(program, *_FLAGS, f"--kubeconfig={node.kubeconfig}"):
            yield
    finally:
        # It leaves its rules when it ends.
        for chain in _CHAINS:
            node.inside("iptables", "--wait", "--flush", chain)


def forget_connections(node: Node) -> None:
    """Make the next packet of an open connection count as the first of a new one."""
    node.inside("conntrack", "--flush")
