"""The status of each pool of a set, and the events that report its changes. Pure.

statuses(observed, plan)     -> {pool: status}; equal to the present one when nothing changed
status_events(old, new)      -> Kubernetes events about the changes that matter
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tandem_contract import labels

from ..conditions import ConditionType, Reason
from ..observed import Observed, PoolKey, roles_of
from ..pods.models import pulled_model
from .actions import SetPlan
from .api_objects import rfc3339
from .progress import condition
from .status_conditions import conditions
from .status_facts import Facts, pool_facts

StatusBody = dict[str, Any]
"""A pool's whole `status`."""

_NORMAL: Final = "Normal"
_WARNING: Final = "Warning"

_EVENT_TYPES: Final[dict[tuple[str, str], Literal["Normal", "Warning"]]] = {
    (ConditionType.READY, "True"): _NORMAL,
    (ConditionType.STALLED, "True"): _WARNING,
    (ConditionType.UPDATE_AVAILABLE, "True"): _NORMAL,
    (ConditionType.TRANSPORT_VERIFIED, "True"): _NORMAL,
    (ConditionType.STORAGE_REACHABLE, "True"): _NORMAL,
    (ConditionType.STORAGE_REACHABLE, "False"): _WARNING,
    (ConditionType.PODS_READY, Reason.UNSCHEDULABLE): _WARNING,
    (ConditionType.PODS_READY, Reason.PODS_FAIL): _WARNING,
    (ConditionType.PODS_READY, Reason.FITS_NO_NODE): _WARNING,
    (ConditionType.COMPATIBLE, Reason.MISMATCH): _WARNING,
    (ConditionType.PEER_READY, Reason.PEER_MISSING): _WARNING,
    (ConditionType.PROGRESSING, Reason.MODEL_PULLS): _NORMAL,
    (ConditionType.RECONCILING, Reason.MODEL_PULL_FAILS): _WARNING,
    (ConditionType.PROGRESSING, Reason.ROLLING_OUT): _NORMAL,
    (ConditionType.PROGRESSING, Reason.WAITING_FOR_PEER): _NORMAL,
    (ConditionType.PROGRESSING, Reason.PAUSED): _NORMAL,
    (ConditionType.PROGRESSING, Reason.COMPLETE): _NORMAL,
    (ConditionType.DRAINING, Reason.DRAIN_STUCK): _WARNING,
}
"""Condition and its new status or reason → type of the event."""


@dataclass(frozen=True)
class Event:
    """One Kubernetes event about a pool."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def statuses(observed: Observed, plan: SetPlan) -> Mapping[PoolKey, StatusBody]:
    """The status of every pool that is not being deleted; equal to what the object has when nothing
    changed.

    `observed.failures` should be those of applying this very plan.
    """
    return {facts.resource.key: _status(facts) for facts in pool_facts(observed, plan)}


def status_events(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Event, ...]:
    """Events for the changes between two statuses of a pool; none when no condition changed."""
    # Status and reason of one condition may both call for the same event.
    return tuple(dict.fromkeys(_events(old, new)))


def selector(key: PoolKey) -> str:
    """Label selector of a pool's pods that do not drain, for the scale subresource."""
    roles = ",".join(roles_of(key.kind))
    return f"{labels.POOL}={key.name},{labels.ROLE} in ({roles}),!{labels.DRAINING}"


def _status(facts: Facts) -> StatusBody:
    plan = facts.plan
    updated = [pod for pod in facts.active_pods if pod.revision == plan.update]
    body: StatusBody = {
        **_columns(facts),
        "replicas": len(facts.active_pods),
        "desiredReplicas": facts.desired,
        "readyReplicas": len(facts.ready_pods),
        "updatedReplicas": len(updated),
        "pairedReplicas": len(facts.paired_pods),
        "drainingReplicas": len(facts.leaving_pods),
        "selector": selector(plan.key),
        "currentRevision": plan.current,
        "updateRevision": plan.update,
        "observedGeneration": facts.plan.generation,
        # Kept until the endpoint is reconciled, like condition RouterReady.
        "endpoint": facts.router.url if facts.router else facts.resource.status.get("endpoint"),
        "progress": facts.last_progress.as_status if facts.last_progress else None,
        "modelPull": _model_pull(facts),
        "scaling": _scaling(facts),
        "conditions": _conditions(facts),
    }
    # The API server stores no null: with nulls the status would differ from the stored one in every
    # pass and be written each time.
    return {name: value for name, value in body.items() if value is not None}


def _columns(facts: Facts) -> dict[str, Any]:
    """Fields for `kubectl get`, inherited ones included; the stored ones for an unreadable spec."""
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


def _model_pull(facts: Facts) -> dict[str, Any] | None:
    """The download that the pool waits for; after it the commit that its pods run."""
    plan = facts.plan
    if plan.pull is not None:
        return {"job": plan.pull.job, **plan.pull.progress}
    pulled = pulled_model(plan.template) if plan.template else None
    return {"commit": pulled.commit} if pulled else None


def _scaling(facts: Facts) -> dict[str, Any] | None:
    pool = facts.plan.pool
    if pool is None or pool.spec.scaling is None:
        return None
    status = facts.resource.status
    before = status.get("scaling")
    is_same = status.get("desiredReplicas") == facts.desired
    since = before.get("lastTransition") if isinstance(before, Mapping) and is_same else None
    return {"reason": "minReplicas", "lastTransition": since or rfc3339(facts.now)}


def _conditions(facts: Facts) -> list[dict[str, Any]]:
    """The conditions with their times; lastTransitionTime is kept while the status is the same."""
    entries = []
    for kind, state in conditions(facts).items():
        before = facts.last_condition(kind)
        is_same = before.get("status") == state.status
        entries.append(
            {
                "type": str(kind),
                "status": state.status,
                "reason": str(state.reason),
                "message": state.message,
                # As Kubernetes' API conventions say: a new reason or message is no transition.
                "lastTransitionTime": (before.get("lastTransitionTime") if is_same else None)
                or rfc3339(facts.now),
                "observedGeneration": facts.plan.generation,
            }
        )
    return entries


def _events(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    for now in new.get("conditions", ()):
        before = condition(old, now["type"])
        for part in ("status", "reason"):
            event_type = _EVENT_TYPES.get((now["type"], now[part]))
            if event_type is not None and before.get(part) != now[part]:
                yield Event(event_type, now["reason"], now["message"])
        # A write that the API server refuses has a reason of its own.
        is_refusal = now["type"] == ConditionType.RECONCILING and now["reason"] not in set(Reason)
        if is_refusal and before.get("reason") != now["reason"]:
            yield Event(_WARNING, now["reason"], now["message"])
        # A pool that is no longer ready: a warning, unless it only waits for more pods to start.
        if now["type"] == ConditionType.READY and before.get("status") == "True" != now["status"]:
            has_lost_pods = new.get("readyReplicas", 0) < old.get("readyReplicas", 0)
            is_growing = now["reason"] == Reason.PODS_NOT_READY and not has_lost_pods
            yield Event(_NORMAL if is_growing else _WARNING, now["reason"], now["message"])
