"""NetworkPolicies enforced on the node: translated into iptables rules for the pods that run now.

The node has no network plugin that enforces policies. The one that would be built with Go alone,
kube-network-policies, steers packets with nftables' queue expression, which not every kernel has.
Rules of iptables do what policies say as long as no pod comes or goes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.node import Node
from tests.operator.reachability import Policy, Source, is_peer, selects

CHAIN = "TANDEM-POLICIES"


@contextmanager
def enforced(node: Node, policies: Iterable[Policy], pods: Iterable[Any]) -> Iterator[None]:
    """Enforce `policies` for `pods` until the block ends, also for connections that are open."""
    sources = [
        Source(pod["metadata"]["namespace"], pod["metadata"].get("labels", {}), address)
        for pod in pods
        if (address := pod["status"].get("podIP")) and not pod["spec"].get("hostNetwork")
    ]
    lines = [
        *("*filter", f":{CHAIN} - [0:0]"),
        f"-A {CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN",
        *(f"-A {CHAIN} {rule}" for rule in _rules(list(policies), sources)),
        *(f"-I FORWARD 1 -j {CHAIN}", "COMMIT", ""),
    ]
    script = "\n".join(lines)
    node.inside("sh", "-c", f"iptables-restore --noflush <<'END'\n{script}END\n")
    try:
        # Packets of open connections count as new ones once they are forgotten.
        node.inside("conntrack", "-F")
        yield
    finally:
        node.inside("iptables", "-D", "FORWARD", "-j", CHAIN)
        node.inside("iptables", "-F", CHAIN)
        node.inside("iptables", "-X", CHAIN)


def _rules(policies: list[Policy], pods: list[Source]) -> Iterator[str]:
    """Rules that let allowed connections return to the calling chain and drop all others."""
    for target in pods:
        specs = [
            policy["spec"]
            for policy in policies
            if policy["metadata"]["namespace"] == target.namespace
            and selects(policy["spec"]["podSelector"], target.labels)
        ]
        # A pod that no policy selects takes every connection.
        if not specs:
            continue
        for rule in (rule for spec in specs for rule in spec.get("ingress", ())):
            for source in _addresses(rule.get("from"), target.namespace, pods):
                every_port: list[dict[str, Any]] = [{}]
                for port in rule.get("ports") or every_port:
                    yield f"-d {target.address} {source} {_ports(port)} -j RETURN"
        yield f"-d {target.address} -j DROP"


def _addresses(peers: Any, namespace: str, pods: list[Source]) -> Iterator[str]:
    if not peers:
        yield ""
        return
    for peer in peers:
        if "ipBlock" in peer:
            yield f"-s {peer['ipBlock']['cidr']}"
        yield from (f"-s {pod.address}" for pod in pods if is_peer(peer, namespace, pod))


def _ports(port: Any) -> str:
    if not port:
        return ""
    last = port.get("endPort", port["port"])
    return f"-p {port.get('protocol', 'TCP').lower()} --dport {port['port']}:{last}"
