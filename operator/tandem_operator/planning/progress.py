"""Whether a pool comes nearer to its spec, and since when it has not. Pure.

The clock of a deadline starts anew with every sign of progress that the API server remembers: a
revision pinned, a pod made for the first time, a pod that became ready.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..conditions import ConditionType, Reason
from ..observed import PodState, PoolResource
from .actions import Mode, PoolPlan
from .parse import timestamp
from .rollout import PROGRESS_DEADLINE

STUCK_AFTER: Final = 30.0
"""Seconds past its grace period after which a pod that still leaves counts as stuck."""


def late(pod: PodState) -> float | None:
    """Unix seconds from which a leaving pod counts as stuck; None while nobody told it to leave."""
    return None if pod.leaves_by is None else pod.leaves_by + STUCK_AFTER


def stuck(pod: PodState, now: float) -> bool:
    """Whether a pod should be gone and is not: nobody answers on its node any more."""
    at = late(pod)
    return at is not None and now >= at


def complete(plan: PoolPlan, counting: Sequence[PodState]) -> bool:
    """Whether the pool has exactly its number of pods, all ready, all of the update revision."""
    ready = [pod for pod in counting if pod.ready and pod.revision == plan.update]
    return plan.mode is Mode.ROLL and len(ready) == len(counting) == plan.desired


def reason(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Reason:
    """Of the condition Progressing."""
    if plan.mode is not Mode.ROLL:
        if plan.laggards:
            return Reason.WAITING_FOR_PEER
        return Reason.HELD if plan.reading.held or plan.refused else Reason.PAUSED
    if complete(plan, counting):
        return Reason.COMPLETE
    if _stopped(resource, plan, counting) or now >= deadline(resource, plan, counting, now):
        return Reason.PROGRESS_DEADLINE_EXCEEDED
    if any(pod.revision != plan.update for pod in counting):
        return Reason.ROLLING_OUT
    return Reason.STARTING if plan.current is None else Reason.SCALING


def deadline(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> float:
    """Unix seconds at which a pool under way counts as stalled."""
    pool = plan.pool
    given = pool.spec.rollout.progress_deadline if pool else None
    before = condition(resource.status, ConditionType.PROGRESSING)
    began = timestamp(before.get("lastTransitionTime")) if before.get("status") == "True" else now
    signs = [began or now, *_signs(plan, counting)]
    return max(signs) + (PROGRESS_DEADLINE if given is None else given)


def wakes(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Iterator[float]:
    """Unix seconds at which time alone changes what is to be said of a pool."""
    said = reason(resource, plan, counting, now)
    if said in (Reason.STARTING, Reason.ROLLING_OUT, Reason.SCALING):
        yield deadline(resource, plan, counting, now)


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of a status as the API server holds it; empty when there is none."""
    found = status.get("conditions")
    for one in found if isinstance(found, list) else ():
        if isinstance(one, Mapping) and one.get("type") == kind:
            return one
    return {}


def _stopped(resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState]) -> bool:
    """Whether the deadline passed before, and nothing happened since."""
    status = resource.status
    before = condition(status, ConditionType.PROGRESSING)
    if before.get("reason") != Reason.PROGRESS_DEADLINE_EXCEEDED:
        return False
    if (status.get("updateRevision"), status.get("desiredReplicas")) != (plan.update, plan.desired):
        return False
    at = timestamp(before.get("lastTransitionTime")) or 0.0
    return not any(sign > at for sign in _signs(plan, counting))


def _signs(plan: PoolPlan, counting: Sequence[PodState]) -> list[float]:
    """Unix seconds at which the update revision's pods got on."""
    mine = [pod for pod in counting if pod.revision == plan.update]
    # A pod that replaces a failed one is the same attempt again.
    made = [pod.created for pod in mine if pod.attempt == 0]
    return [*made, *(pod.ready_since for pod in mine if pod.ready_since is not None)]
