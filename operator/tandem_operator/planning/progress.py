"""Whether a pool comes nearer to its spec, and when it counts as stalled. Pure.

The deadline runs anew when more pods of the update revision are available than ever in this attempt
to apply the spec. A pod that gets ready again, or that replaces one that crashed, is no progress: a
revision whose pods crash again and again stalls. The record is `status.progress`. Nothing is kept
in memory, so a restart of the operator changes no deadline.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..conditions import Reason
from ..observed import PodState, PoolResource
from .actions import Mode, PoolPlan
from .api_objects import rfc3339, timestamp
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


@dataclass(frozen=True)
class Progress:
    """The last progress of a pool whose pods are not yet as the spec says."""

    generation: int
    revision: str
    available: int
    """Most pods of the revision that were available at the same time."""
    time: float
    """Unix seconds at which `available` last grew, or the attempt began."""

    @property
    def as_status(self) -> dict[str, Any]:
        """`status.progress`."""
        return {
            "generation": self.generation,
            "revision": self.revision,
            "availableReplicas": self.available,
            "lastProgressTime": rfc3339(self.time),
        }


def is_complete(plan: PoolPlan, counting: Sequence[PodState]) -> bool:
    """Whether the pool has exactly its number of pods, all available, of the update revision."""
    return plan.mode is Mode.ROLL and _available(plan, counting) == len(counting) == plan.desired


def last_progress(
    resource: PoolResource,
    plan: PoolPlan,
    counting: Sequence[PodState],
    now: float,
    *,
    is_refused: bool = False,
) -> Progress | None:
    """The progress up to now; None for a pool that has nothing to reach, or that others hold up.

    `is_refused`: the API server refused a write about the pool.
    """
    reason = progressing_reason_before_deadline(plan, counting)
    if reason is Reason.COMPLETE and is_refused:
        reason = Reason.HELD
    # A download may take longer than the deadline; one that does not get on is HELD.
    is_downloading = reason is Reason.MODEL_PULLS and plan.pull is not None and plan.pull.has_pod
    if is_downloading or reason in (Reason.COMPLETE, Reason.PAUSED, Reason.WAITING_FOR_PEER):
        return None
    present = Progress(plan.generation, plan.update or "", _available(plan, counting), now)
    before = _stored_progress(resource.status)
    # A changed spec is a new attempt with a deadline of its own.
    if before is None or (before.generation, before.revision) != (
        present.generation,
        present.revision,
    ):
        return present
    return present if present.available > before.available else before


def progressing_reason(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Reason:
    """The reason of condition Progressing."""
    reason = progressing_reason_before_deadline(plan, counting)
    is_moving = reason in (Reason.ROLLING_OUT, Reason.STARTING, Reason.SCALING)
    if is_moving and now >= deadline(resource, plan, counting, now):
        return Reason.PROGRESS_DEADLINE_EXCEEDED
    return reason


def progressing_reason_before_deadline(plan: PoolPlan, counting: Sequence[PodState]) -> Reason:
    """The reason of condition Progressing for a pool that is not overdue."""
    if plan.mode is not Mode.ROLL:
        if plan.blocked_by:
            return Reason.WAITING_FOR_PEER
        if plan.validation.rejection or plan.refused or (plan.pull and plan.pull.failure):
            return Reason.HELD
        return Reason.MODEL_PULLS if plan.pull else Reason.PAUSED
    if is_complete(plan, counting):
        return Reason.COMPLETE
    if any(pod.revision != plan.update for pod in counting):
        return Reason.ROLLING_OUT
    return Reason.STARTING if plan.current is None else Reason.SCALING


def deadline(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> float:
    """Unix seconds from which a pool that is not complete counts as stalled."""
    record = last_progress(resource, plan, counting, now)
    return (record.time if record else now) + allowed_time(plan)


def allowed_time(plan: PoolPlan) -> float:
    """Seconds without progress after which a pool counts as stalled."""
    seconds = plan.rollout.progress_deadline
    return PROGRESS_DEADLINE if seconds is None else seconds


def requeue_times(
    resource: PoolResource, plan: PoolPlan, counting: Sequence[PodState], now: float
) -> Iterator[float]:
    """Unix seconds at which a pool's status changes although no object in the cluster changes."""
    if last_progress(resource, plan, counting, now) is not None:
        time = deadline(resource, plan, counting, now)
        if time > now:
            yield time


def condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of a status as the API server has it; empty when there is none."""
    conditions = status.get("conditions")
    for entry in conditions if isinstance(conditions, list) else ():
        if isinstance(entry, Mapping) and entry.get("type") == kind:
            return entry
    return {}


def _available(plan: PoolPlan, counting: Sequence[PodState]) -> int:
    return len([pod for pod in counting if pod.available and pod.revision == plan.update])


def _stored_progress(status: Mapping[str, Any]) -> Progress | None:
    """The record as the API server has it; None when there is none that can be read."""
    stored = status.get("progress")
    if not isinstance(stored, Mapping):
        return None
    time = timestamp(stored.get("lastProgressTime"))
    generation, available = stored.get("generation"), stored.get("availableReplicas")
    if time is None or not isinstance(generation, int) or not isinstance(available, int):
        return None
    return Progress(generation, str(stored.get("revision")), available, time)
