"""Which connections NetworkPolicies allow, by the rules of networking.k8s.io/v1. Pure.

Written from the API's documentation and not from the policies that are checked with it, so that a
mistake in one of them shows.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """A pod that opens a connection, or an address outside all pods."""

    namespace: str = ""
    """Empty: no pod."""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "203.0.113.7"


def may_connect(
    policies: Iterable[Policy], source: Source, target: Source, port: int, protocol: str = "TCP"
) -> bool:
    """Whether `source` may open a connection to `port` of the pod `target`."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == target.namespace
        and selects(policy["spec"]["podSelector"], target.labels)
        and "Ingress" in policy["spec"]["policyTypes"]
    ]
    # A pod that no policy selects takes every connection.
    return not selecting or any(
        _allows(rule, target.namespace, source, port, protocol)
        for spec in selecting
        for rule in spec.get("ingress", ())
    )


def _allows(
    rule: Mapping[str, Any], namespace: str, source: Source, port: int, protocol: str
) -> bool:
    # No peers: every peer. No ports: every port.
    peers, ports = rule.get("from"), rule.get("ports")
    return (not peers or any(is_peer(peer, namespace, source) for peer in peers)) and (
        not ports or any(_has_port(item, port, protocol) for item in ports)
    )


def is_peer(peer: Mapping[str, Any], namespace: str, source: Source) -> bool:
    """Whether a peer of a rule in a policy of `namespace` names the source."""
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(source.address), peer["ipBlock"]
        excluded = any(address in ipaddress.ip_network(n) for n in block.get("except", ()))
        return address in ipaddress.ip_network(block["cidr"]) and not excluded
    if not source.namespace:
        return False
    if (selector := peer.get("namespaceSelector")) is not None:
        labels = {"kubernetes.io/metadata.name": source.namespace}
        in_namespace = selects(selector, labels)
    else:
        in_namespace = source.namespace == namespace
    return in_namespace and selects(peer.get("podSelector", {}), source.labels)


def _has_port(item: Mapping[str, Any], port: int, protocol: str) -> bool:
    if item.get("protocol", "TCP") != protocol:
        return False
    return bool(item["port"] <= port <= item.get("endPort", item["port"]))


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects an object with these labels."""
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(term, labels) for term in selector.get("matchExpressions", ()))


def _meets(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(term["key"])
    match term["operator"]:
        case "In":
            return value in term["values"]
        case "NotIn":
            # True without the label, too.
            return value not in term["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(term["operator"])
