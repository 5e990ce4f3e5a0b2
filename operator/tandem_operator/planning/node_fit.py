"""Whether a replica fits on any node: its resource requests, node selector, node affinity, and the
taints of nodes. Pure.

Temporary obstacles are left out (other pods, cordons, pressure), so a reported misfit is permanent
unless an autoscaler adds a node. Pods are created all the same, so that an autoscaler sees them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from tandem_contract.quantities import quantity
from tandem_contract.selectors import OPERATORS, holds

from ..observed import Body, NodeState

_TRANSIENT: Final = "node.kubernetes.io/"
"""Prefix of the taints that Kubernetes sets and removes by itself: not ready, under pressure."""
_REPELLING_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})

Amounts = dict[str, Decimal]
"""Name of a resource → amount."""


def no_fit_reason(pod_spec: Body, nodes: Sequence[NodeState]) -> str | None:
    """Why a pod of this spec fits on none of `nodes`, in a line; None when it fits on one.

    The line names the amount requested and the node that has most of it.
    """
    if not nodes:
        return "there is no node in the cluster"
    requested = pod_requests(pod_spec)
    admitting = [node for node in nodes if _admits(node, pod_spec)]
    if not admitting:
        return _no_node_admits(pod_spec, nodes)
    if any(_holds(node, requested) for node in admitting):
        return None
    # A single resource that no node has enough of makes the clearest message.
    for name, amount in requested.items():
        largest = max(admitting, key=lambda node: (_allocatable(node, name), node.name))
        if _allocatable(largest, name) < amount:
            return _too_large(name, amount, largest, admitting)
    # Each resource alone fits on some node, but no node has all of them.
    largest = max(admitting, key=lambda node: (_fitting_resources(node, requested), node.name))
    lacking = [name for name, amount in requested.items() if _allocatable(largest, name) < amount]
    return (
        f"a replica requests {_listed(requested)}, and no node has all of it; {largest.name} comes"
        f" nearest and lacks {', '.join(lacking)}"
    )


def pod_requests(pod_spec: Body) -> Amounts:
    """The resources that the scheduler reserves for a pod.

    The sum of its containers and native sidecars, or its largest init container with the sidecars
    that run by then, whichever is more; and the pod's overhead.
    """
    running: Amounts = {}
    peak: Amounts = {}
    for container in _mappings(pod_spec, "initContainers"):
        amounts = _container_requests(container)
        # A native sidecar runs on beside all later containers; other init containers end first.
        if container.get("restartPolicy") == "Always":
            running = _sum(running, amounts)
            amounts = {}
        peak = _maximum(peak, _sum(running, amounts))
    for container in _mappings(pod_spec, "containers"):
        running = _sum(running, _container_requests(container))
    return _sum(_maximum(peak, running), _amounts(pod_spec.get("overhead") or {}))


def _too_large(
    name: str, amount: Decimal, largest: NodeState, admitting: Sequence[NodeState]
) -> str:
    has = largest.allocatable.get(name)
    requested = f"a replica requests {name}: {_shown(amount)}"
    if has is None:
        return f"{requested}, and no node has {name}"
    return (
        f"{requested}; of the {len(admitting)} nodes that its selectors and tolerations admit, the"
        f" largest, {largest.name}, has {has}"
    )


def _no_node_admits(pod_spec: Body, nodes: Sequence[NodeState]) -> str:
    """Which of node selector, node affinity and taints excludes every node."""
    selector = pod_spec.get("nodeSelector") or {}
    selected = [node for node in nodes if _has_labels(node, selector)]
    if not selected:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return f"no node has the labels {shown} of the node selector"
    matching = [node for node in selected if _matches_affinity(node, pod_spec)]
    if not matching:
        return "no node matches the required node affinity"
    taints = sorted(
        {_taint_text(t) for node in matching for t in _untolerated_taints(node, pod_spec)}
    )
    return f"every node has a taint that the pods do not tolerate: {', '.join(taints)}"


def _admits(node: NodeState, pod_spec: Body) -> bool:
    return (
        _has_labels(node, pod_spec.get("nodeSelector") or {})
        and _matches_affinity(node, pod_spec)
        and not any(_untolerated_taints(node, pod_spec))
    )


def _has_labels(node: NodeState, selector: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in selector.items())


def _matches_affinity(node: NodeState, pod_spec: Body) -> bool:
    """Whether the node matches one of the required terms; all expressions of a term must hold."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = _mappings(required, "nodeSelectorTerms")
    return not terms or any(
        all(_matches(node, expression) for expression in _mappings(term, "matchExpressions"))
        for term in terms
    )


def _matches(node: NodeState, expression: Body) -> bool:
    """Whether a node matches a label expression; an unknown operator (Gt, Lt) counts as a match."""
    value, operator = node.labels.get(str(expression.get("key"))), str(expression.get("operator"))
    values = expression.get("values") or ()
    return operator not in OPERATORS or holds(value, operator, values)


def _untolerated_taints(node: NodeState, pod_spec: Body) -> Iterator[Body]:
    tolerations = _mappings(pod_spec, "tolerations")
    for taint in node.taints:
        is_lasting = not str(taint.get("key", "")).startswith(_TRANSIENT)
        repels = is_lasting and taint.get("effect") in _REPELLING_EFFECTS
        if repels and not any(_tolerates(toleration, taint) for toleration in tolerations):
            yield taint


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    # As in Kubernetes: an empty effect matches all effects, and Exists without a key all taints.
    key = toleration.get("key")
    if toleration.get("operator") == "Exists":
        return key in (None, "", taint.get("key"))
    return bool(
        key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _taint_text(taint: Body) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def _holds(node: NodeState, requested: Amounts) -> bool:
    return all(_allocatable(node, name) >= amount for name, amount in requested.items())


def _fitting_resources(node: NodeState, requested: Amounts) -> int:
    """How many of the requested resources the node has enough of."""
    return sum(_allocatable(node, name) >= amount for name, amount in requested.items())


def _allocatable(node: NodeState, name: str) -> Decimal:
    return quantity(node.allocatable.get(name, "0")) or Decimal(0)


def _container_requests(container: Body) -> Amounts:
    """Requests, and limits for resources without a request, as Kubernetes defaults them."""
    resources = container.get("resources") or {}
    return {
        **_amounts(resources.get("limits") or {}),
        **_amounts(resources.get("requests") or {}),
    }


def _amounts(quantities: Mapping[str, Any]) -> Amounts:
    amounts = {name: quantity(value) for name, value in quantities.items()}
    return {name: amount for name, amount in amounts.items() if amount}


def _sum(first: Amounts, second: Amounts) -> Amounts:
    zero = Decimal(0)
    return {name: first.get(name, zero) + second.get(name, zero) for name in first | second}


def _maximum(first: Amounts, second: Amounts) -> Amounts:
    zero = Decimal(0)
    return {name: max(first.get(name, zero), second.get(name, zero)) for name in first | second}


def _listed(amounts: Amounts) -> str:
    return ", ".join(f"{name}: {_shown(amount)}" for name, amount in amounts.items())


def _shown(amount: Decimal) -> str:
    """In Gi or Mi where the amount is a whole number of them."""
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20)):
        if amount >= size and amount % size == 0:
            return f"{amount // size}{unit}"
    return f"{amount.normalize():f}"


def _mappings(body: Body, name: str) -> Iterable[Body]:
    value = body.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
