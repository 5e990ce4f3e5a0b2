"""PodDisruptionBudgets of pools: how many pods a node drain must leave. Pure.

One pod may always be evicted, also the only one of a pool: its own drain loses no request, and a
budget that forbids the eviction would block the maintenance of its node for good.
"""

from collections.abc import Iterable

from tandem_contract import labels

from ..observed import Body, PoolResource, roles_of
from .drift import is_up_to_date
from .revisions import owner_reference
from .rollout import Limits


def budget_name(resource: PoolResource) -> str:
    """The budget's name, with the pool's kind in it: two pools of a set may share a name."""
    return f"{resource.key.name}-{roles_of(resource.key.kind)[0]}"


def budget(resource: PoolResource, limits: Limits) -> Body | None:
    """The pool's budget; None when the pool has at most one pod more than may be missing."""
    # At least one pod may be missing, also where maxUnavailable is 0.
    fewest = limits.desired - max(1, limits.unavailable)
    if fewest < 1:
        return None
    key = resource.key
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(resource),
            "namespace": key.namespace,
            "labels": {
                labels.POOL: key.name,
                labels.ROLE: roles_of(key.kind)[0],
                labels.MANAGED_BY: "tandem-operator",
            },
            "ownerReferences": [owner_reference(resource)],
        },
        "spec": {
            "minAvailable": fewest,
            # Otherwise pods that never become ready could block the drain of their node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {labels.POOL: key.name},
                "matchExpressions": [
                    {"key": labels.ROLE, "operator": "In", "values": list(roles_of(key.kind))},
                    # A draining pod takes no new request, so it must not count as available.
                    {"key": labels.DRAINING, "operator": "DoesNotExist"},
                ],
            },
        },
    }


def has_budget(desired: Body, live: Iterable[Body]) -> bool:
    """Whether the API server has this budget already."""
    return any(
        body["metadata"]["name"] == desired["metadata"]["name"] and is_up_to_date(body, desired)
        for body in live
    )
