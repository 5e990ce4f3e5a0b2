"""PodDisruptionBudgets: how many pods of a pool a node drain leaves. Pure.

One pod at a time may always go, of a single replica too: its own drain loses no request, and a
budget that forbids it would block every node's maintenance for good.
"""

from collections.abc import Iterable

from tandem_contract import labels

from ..observed import Body, PoolResource, roles_of
from .covers import covers
from .revisions import owner
from .rollout import Limits


def name_of(resource: PoolResource) -> str:
    """With the kind in it: two pools of a set may share a name."""
    return f"{resource.key.name}-{roles_of(resource.key.kind)[0]}"


def budget(resource: PoolResource, within: Limits) -> Body | None:
    """The pool's budget; None when one pod or none is all there is."""
    fewest = within.desired - max(1, within.unavailable)
    if fewest < 1:
        return None
    key = resource.key
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": name_of(resource),
            "namespace": key.namespace,
            "labels": {
                labels.POOL: key.name,
                labels.ROLE: roles_of(key.kind)[0],
                labels.MANAGED_BY: "tandem-operator",
            },
            "ownerReferences": [owner(resource)],
        },
        "spec": {
            "minAvailable": fewest,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {labels.POOL: key.name},
                "matchExpressions": [
                    {"key": labels.ROLE, "operator": "In", "values": list(roles_of(key.kind))},
                    {"key": labels.DRAINING, "operator": "DoesNotExist"},
                ],
            },
        },
    }


def is_kept(wanted: Body, seen: Iterable[Body]) -> bool:
    """Whether the API server has this budget already."""
    return any(
        one["metadata"]["name"] == wanted["metadata"]["name"] and covers(one, wanted)
        for one in seen
    )
