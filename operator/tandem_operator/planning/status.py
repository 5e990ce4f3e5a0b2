"""The status of each pool of a set. Pure: a pool at rest gives the status that it has already.

statuses(observed, plan) -> {pool: status}      transitions(old, new) -> events
"""

from collections.abc import Mapping
from typing import Any

from tandem_contract import labels

from ..observed import Observed, PoolKey, roles_of
from .actions import SetPlan
from .parse import rfc3339
from .status_conditions import conditions
from .status_facts import Facts, facts
from .transitions import Event, transitions

__all__ = ["Event", "StatusBody", "statuses", "transitions"]

StatusBody = dict[str, Any]
"""A pool's whole `status`."""


def statuses(observed: Observed, plan: SetPlan) -> Mapping[PoolKey, StatusBody]:
    """The status of every pool that is not being deleted; equal to what the object has when nothing
    changed.

    `observed.failures` should be those of the apply of this very plan.
    """
    return {one.resource.key: _status(one) for one in facts(observed, plan)}


def selector(key: PoolKey) -> str:
    """Label selector of a pool's pods that do not drain, for the scale subresource."""
    roles = ",".join(roles_of(key.kind))
    return f"{labels.POOL}={key.name},{labels.ROLE} in ({roles}),!{labels.DRAINING}"


def _status(facts: Facts) -> StatusBody:
    plan = facts.plan
    updated = [pod for pod in facts.active if pod.revision == plan.update]
    body: StatusBody = {
        **_resolved(facts),
        "replicas": len(facts.active),
        "desiredReplicas": facts.desired,
        "readyReplicas": len(facts.ready),
        "updatedReplicas": len(updated),
        "pairedReplicas": len(facts.paired),
        "drainingReplicas": len(facts.leaving),
        "selector": selector(plan.key),
        "currentRevision": plan.current,
        "updateRevision": plan.update,
        "observedGeneration": facts.resource.generation,
        "endpoint": facts.router.url if facts.router else None,
        "scaling": _scaling(facts),
        "conditions": _conditions(facts),
    }
    return {name: value for name, value in body.items() if value is not None}


def _resolved(facts: Facts) -> dict[str, Any]:
    """What columns show of a pool, inherited or not; as last known where it cannot be read."""
    pool = facts.plan.pool
    if pool is None:
        status = facts.resource.status
        names = ("model", "tensorParallel", "accelerator", "connector")
        return {name: status.get(name) for name in names}
    accelerator = pool.spec.accelerator
    kind = accelerator.type or accelerator.resource.rpartition("/")[2]
    return {
        "model": pool.spec.model.name,
        "tensorParallel": pool.spec.parallelism.tensor,
        "accelerator": f"{accelerator.count}x{kind}" if accelerator.count else "cpu",
        "connector": pool.spec.transfer.connector,
    }


def _scaling(facts: Facts) -> dict[str, Any] | None:
    pool = facts.plan.pool
    if pool is None or pool.spec.scaling is None:
        return None
    status = facts.resource.status
    before = status.get("scaling")
    same = status.get("desiredReplicas") == facts.desired
    since = before.get("lastTransition") if isinstance(before, Mapping) and same else None
    return {"reason": "minReplicas", "lastTransition": since or rfc3339(facts.now)}


def _conditions(facts: Facts) -> list[dict[str, Any]]:
    found = []
    for kind, stated in conditions(facts).items():
        before = facts.before(kind)
        same = before.get("status") == stated.status
        found.append(
            {
                "type": str(kind),
                "status": stated.status,
                "reason": str(stated.reason),
                "message": stated.message,
                "lastTransitionTime": (before.get("lastTransitionTime") if same else None)
                or rfc3339(facts.now),
                "observedGeneration": facts.resource.generation,
            }
        )
    return found
