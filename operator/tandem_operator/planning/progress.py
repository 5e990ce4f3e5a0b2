"""Whether a pool comes nearer to its spec, and when it counts as stalled. Pure.

The deadline runs anew from every sign of progress that is stored in the cluster: a revision
pinned, a pod created for the first time, a pod that became ready. Nothing is kept in memory, so a
restart of the operator changes no deadline.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..conditions import ConditionType, Reason
from ..observed import PodState, PoolResource
from .actions import Mode, PoolPlan
from .api_objects import timestamp
from .rollout import PROGRESS_DEADLINE

STUCK_AFTER: Final = 30.0
"""Seconds past its grace period after which a terminating pod counts as stuck."""


def stuck_from(pod: PodState) -> float | None:
    """Unix seconds from which a terminating pod counts as stuck; None for a pod not deleted."""
    return None if pod.leaves_by is None else pod.leaves_by + STUCK_AFTER


def is_stuck(pod: PodState, now: float) -> bool:
    """Whether a pod should be gone and is not: the kubelet of its node does not answer."""
    start = stuck_from(pod)
    return start is not None and now >= start


def is_complete(plan: PoolPlan, counting: Sequence[PodState]) -> bool:
    """Whether the pool has exactly its number of pods, all ready, all of the update revision."""
    ready = [pod for pod in counting if pod.ready and pod.revision == plan.update]
    return plan.mode is Mode.ROLL and len(ready) == len(counting) == plan.desired


def progressing_reason(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Reason:
    """The reason of condition Progressing."""
    if plan.mode is not Mode.ROLL:
        if plan.blocked_by:
            return Reason.WAITING_FOR_PEER
        return Reason.HELD if plan.validation.rejection or plan.refused else Reason.PAUSED
    if is_complete(plan, counting):
        return Reason.COMPLETE
    if _remains_stalled(resource, plan, counting) or now >= deadline(resource, plan, counting, now):
        return Reason.PROGRESS_DEADLINE_EXCEEDED
    if any(pod.revision != plan.update for pod in counting):
        return Reason.ROLLING_OUT
    return Reason.STARTING if plan.current is None else Reason.SCALING


def deadline(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> float:
    """Unix seconds from which a pool that is not complete counts as stalled."""
    pool = plan.pool
    seconds = pool.spec.rollout.progress_deadline if pool else None
    before = condition(resource.status, ConditionType.PROGRESSING)
    # The rollout began when Progressing became True; a pool that only starts now begins now.
    began = timestamp(before.get("lastTransitionTime")) if before.get("status") == "True" else now
    last_sign = max([began or now, *_progress_times(plan, counting)])
    return last_sign + (PROGRESS_DEADLINE if seconds is None else seconds)


def requeue_times(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Iterator[float]:
    """Unix seconds at which a pool's status changes although no object in the cluster changes."""
    reason = progressing_reason(resource, plan, counting, now)
    if reason in (Reason.STARTING, Reason.ROLLING_OUT, Reason.SCALING):
        yield deadline(resource, plan, counting, now)


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of a status as the API server has it; empty when there is none."""
    conditions = status.get("conditions")
    for entry in conditions if isinstance(conditions, list) else ():
        if isinstance(entry, Mapping) and entry.get("type") == kind:
            return entry
    return {}


def _remains_stalled(resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState]) -> bool:
    """Whether the deadline has passed in an earlier pass and no progress was made since.

    `deadline` alone does not tell: condition Progressing is False by then, so there is no start.
    """
    status = resource.status
    before = condition(status, ConditionType.PROGRESSING)
    if before.get("reason") != Reason.PROGRESS_DEADLINE_EXCEEDED:
        return False
    # A changed spec is a new attempt with a deadline of its own.
    if (status.get("updateRevision"), status.get("desiredReplicas")) != (plan.update, plan.desired):
        return False
    # When the pool was found stalled: only signs of progress after that count.
    since = timestamp(before.get("lastTransitionTime")) or 0.0
    return not any(time > since for time in _progress_times(plan, counting))


def _progress_times(plan: PoolPlan, counting: Sequence[PodState]) -> list[float]:
    """Unix seconds at which pods of the update revision were first created or became ready."""
    pods = [pod for pod in counting if pod.revision == plan.update]
    # A pod that replaces a failed one is no progress.
    created = [pod.created for pod in pods if pod.attempt == 0]
    return [*created, *(pod.ready_since for pod in pods if pod.ready_since is not None)]
