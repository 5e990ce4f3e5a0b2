"""Whether a replica fits on any node there is: its resources, node selector and affinity, and what
nodes repel. Pure.

What is only so for now is left out: other pods, cordons, pressure. So no verdict is a false alarm,
but for nodes that an autoscaler would add; pods are made all the same, and it sees them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from ..observed import Body, NodeState
from .covers import quantity

_TRANSIENT: Final = "node.kubernetes.io/"
_REPELS: Final = frozenset({"NoSchedule", "NoExecute"})

Amounts = dict[str, Decimal]


def misfit(pod_spec: Body, nodes: Sequence[NodeState]) -> str | None:
    """Why a pod of this spec runs on none of `nodes`, in a line; None when it fits on one.

    Names what is wanted and the largest node there is of it.
    """
    if not nodes:
        return "there is no node in the cluster"
    wanted = requests(pod_spec)
    admitted = [node for node in nodes if _admits(node, pod_spec)]
    if not admitted:
        return _nobody_admits(pod_spec, nodes)
    if any(_holds(node, wanted) for node in admitted):
        return None
    for name, amount in wanted.items():
        largest = max(admitted, key=lambda node: (_has(node, name), node.name))
        if _has(largest, name) < amount:
            return _too_large(name, amount, largest, admitted)
    largest = max(admitted, key=lambda node: (_matched(node, wanted), node.name))
    lacking = [name for name, amount in wanted.items() if _has(largest, name) < amount]
    return (
        f"a replica wants {_listed(wanted)}, which no node has together; {largest.name} comes"
        f" nearest and lacks {', '.join(lacking)}"
    )


def requests(pod_spec: Body) -> Amounts:
    """What the scheduler reserves for a pod: its containers and native sidecars together, or its
    largest init container with the sidecars that run by then."""
    running: Amounts = {}
    peak: Amounts = {}
    for container in _list(pod_spec, "initContainers"):
        amounts = _of(container)
        if container.get("restartPolicy") == "Always":
            running = _sum(running, amounts)
            amounts = {}
        peak = _most(peak, _sum(running, amounts))
    for container in _list(pod_spec, "containers"):
        running = _sum(running, _of(container))
    return _sum(_most(peak, running), _amounts(pod_spec.get("overhead") or {}))


def _too_large(
    name: str, amount: Decimal, largest: NodeState, admitted: Sequence[NodeState]
) -> str:
    has = largest.allocatable.get(name)
    if has is None:
        return f"a replica wants {name}: {_shown(amount)}, and no node has {name}"
    of = f" of the {len(admitted)} nodes that its selectors and tolerations leave"
    return f"a replica wants {name}: {_shown(amount)}; the largest{of}, {largest.name}, has {has}"


def _nobody_admits(pod_spec: Body, nodes: Sequence[NodeState]) -> str:
    """Which of selector, affinity and taints leaves no node."""
    selector = pod_spec.get("nodeSelector") or {}
    chosen = [node for node in nodes if _selected(node, selector)]
    if not chosen:
        shown = ", ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        return f"no node has the labels {shown} of the node selector"
    near = [node for node in chosen if _affine(node, pod_spec)]
    if not near:
        return "no node matches the required node affinity"
    taints = sorted({_taint(one) for node in near for one in _repelling(node, pod_spec)})
    return f"every node repels the pods, whose tolerations lack {', '.join(taints)}"


def _admits(node: NodeState, pod_spec: Body) -> bool:
    return (
        _selected(node, pod_spec.get("nodeSelector") or {})
        and _affine(node, pod_spec)
        and not any(_repelling(node, pod_spec))
    )


def _selected(node: NodeState, selector: Mapping[str, str]) -> bool:
    return all(node.labels.get(key) == value for key, value in selector.items())


def _affine(node: NodeState, pod_spec: Body) -> bool:
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = _list(required, "nodeSelectorTerms")
    return not terms or any(
        all(_matches(node, one) for one in _list(term, "matchExpressions")) for term in terms
    )


def _matches(node: NodeState, expression: Body) -> bool:
    value = node.labels.get(str(expression.get("key")))
    values = expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return True


def _repelling(node: NodeState, pod_spec: Body) -> Iterator[Body]:
    tolerations = _list(pod_spec, "tolerations")
    for taint in node.taints:
        lasting = not str(taint.get("key", "")).startswith(_TRANSIENT)
        repels = lasting and taint.get("effect") in _REPELS
        if repels and not any(_tolerates(one, taint) for one in tolerations):
            yield taint


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key")
    if toleration.get("operator") == "Exists":
        return key in (None, "", taint.get("key"))
    return bool(
        key == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _taint(taint: Body) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def _holds(node: NodeState, wanted: Amounts) -> bool:
    return all(_has(node, name) >= amount for name, amount in wanted.items())


def _matched(node: NodeState, wanted: Amounts) -> int:
    return sum(_has(node, name) >= amount for name, amount in wanted.items())


def _has(node: NodeState, name: str) -> Decimal:
    return quantity(node.allocatable.get(name, "0")) or Decimal(0)


def _of(container: Body) -> Amounts:
    """Requests, with limits where a resource has no request."""
    resources = container.get("resources") or {}
    return {
        **_amounts(resources.get("limits") or {}),
        **_amounts(resources.get("requests") or {}),
    }


def _amounts(said: Mapping[str, Any]) -> Amounts:
    found = {name: quantity(value) for name, value in said.items()}
    return {name: amount for name, amount in found.items() if amount}


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in one | other}


def _most(one: Amounts, other: Amounts) -> Amounts:
    zero = Decimal(0)
    return {name: max(one.get(name, zero), other.get(name, zero)) for name in one | other}


def _listed(wanted: Amounts) -> str:
    return ", ".join(f"{name}: {_shown(amount)}" for name, amount in wanted.items())


def _shown(amount: Decimal) -> str:
    """Whole binary units where there are any."""
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20)):
        if amount >= size and amount % size == 0:
            return f"{amount // size}{unit}"
    return f"{amount.normalize():f}"


def _list(body: Body, name: str) -> Iterable[Body]:
    found = body.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
