"""How many pods of which revision to add and to remove in one pass over a pool. Pure arithmetic.

    desired D, surge S, unavailable U        N, O: pods of the update revision, of older revisions
    floor   F = max(0, D - U - available N)  older pods that are still needed
    remove  older pods above F, as long as D - U stay available
    add     min(F - O, room) of the current revision, then min(D - N, room) of the update revision
    room    D + S - all pods; failing pods of the update revision give way to missing older pods

A pod is available when it has been ready for `rollout.minReadySeconds`: a revision whose pods get
ready and then crash must not take the place of one that serves.

The update revision is the one to roll to; the current revision is the one that served last.

A lost older pod makes O smaller than F and is therefore replaced by the current revision: the
update revision has not proved yet that it serves. Pods of a revision that is neither current nor
update belong to a rollout that was replaced before it served: they are removed at once unless they
are ready, and never added again.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ..observed import PodState
from ..resources.pools import Pool
from ..resources.spec import Rollout

MAX_SURGE: Final = "25%"
MAX_UNAVAILABLE: Final = "25%"
"""The defaults of a Deployment. For pods with accelerators `limits` has others: few clusters have
one to spare, and a rollout that asks for it stalls."""
MIN_READY_SECONDS: Final = 10
"""An engine that answers /health and fails at its first requests does so within seconds. Zero would
count it as available before it has served anything; each step of a rollout waits this long."""
PROGRESS_DEADLINE: Final = 2400.0
"""Seconds; more than the 1800 that an engine may take to load its weights."""


@dataclass(frozen=True)
class Limits:
    """How many pods a pool may have, and must have ready, while it rolls."""

    desired: int
    surge: int
    unavailable: int

    @property
    def most(self) -> int:
        return self.desired + self.surge

    @property
    def fewest_ready(self) -> int:
        return self.desired - self.unavailable


@dataclass(frozen=True)
class Gate:
    """Which older pods of a pool the rest of the set still needs."""

    is_open: bool = True
    """False: older pods are removed only to make room for a first pod of the new revision."""
    keep: Collection[str] = ()
    """Names of pods that stay: the last of their compat hash, which decode pods still use."""


@dataclass(frozen=True)
class PodChanges:
    """Pods to remove, and numbers of pods to add."""

    remove: tuple[PodState, ...] = ()
    add_current: int = 0
    add_update: int = 0


OPEN: Final = Gate()


def pool_limits(pool: Pool | None, desired: int) -> Limits:
    """The limits of a pool; None: a pool that cannot be read."""
    if pool is None:
        return limits(Rollout(), desired)
    return limits(pool.spec.rollout, desired, accelerators=pool.spec.accelerator.count)


def limits(rollout: Rollout, desired: int, *, accelerators: int = 0) -> Limits:
    """maxSurge and maxUnavailable in pods, of `desired` pods.

    A percentage is rounded up for surge and down for unavailable. One of the two is at least 1.
    Pods with `accelerators` take no more of them by default: surge is 0 and at least one pod may be
    missing. Only a single replica, which is the whole pool, is still replaced by surge.
    Raises ValueError for text that is no percentage.
    """
    unavailable = _pod_count(rollout.max_unavailable, MAX_UNAVAILABLE, desired, up=False)
    default_surge = MAX_SURGE
    if accelerators and desired > 1:
        if rollout.max_unavailable is None:
            unavailable = max(1, unavailable)
        if unavailable:
            default_surge = "0%"
    surge = _pod_count(rollout.max_surge, default_surge, desired, up=True)
    # Kubernetes' Deployments do the same: otherwise no pod could ever be replaced.
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Limits(desired, surge, min(unavailable, desired))


def roll(
    pods: Sequence[PodState], bounds: Limits, current: str | None, update: str, gate: Gate = OPEN
) -> PodChanges:
    """One step towards `desired` pods of revision `update`.

    `pods`: those that fill a place. `current`: None when no revision has served yet.
    """
    # Three disjoint groups: the update revision, abandoned revisions, and older pods that serve or
    # may serve. Ready pods of an abandoned revision count as older ones: they are in use.
    new = [pod for pod in pods if pod.revision == update]
    abandoned = [pod for pod in pods if pod.revision not in (update, current) and not pod.ready]
    old = [pod for pod in pods if pod not in new and pod not in abandoned]
    # After a scale-down there may be more new pods than desired.
    remove = [*abandoned, *_first_to_remove(new, len(new) - bounds.desired)]
    new = [pod for pod in new if pod not in remove]
    # Each available new pod replaces one older pod that is still needed.
    floor = max(0, bounds.fewest_ready - _available_count(new))
    remove += _older_to_remove(old, new, floor, bounds, gate)
    stay = [pod for pod in (*new, *old) if pod not in remove]
    # After a scale-down there can be too many pods of both revisions: remove unready new pods,
    # which serve no request yet.
    unready = [pod for pod in new if not pod.ready]
    remove += _first_to_remove(unready, min(len(stay) - bounds.most, len(unready)))
    stay = [pod for pod in stay if pod not in remove]
    missing = 0
    if current is not None and current != update:
        missing = max(0, floor - len([pod for pod in stay if pod.revision != update]))
    # The revision that served comes back in the places of new pods that fail.
    failing = [pod for pod in stay if pod.revision == update and pod.is_failing]
    remove += _first_to_remove(failing, missing - max(0, bounds.most - len(stay)))
    stay = [pod for pod in stay if pod not in remove]
    # From here on pods are added. Pods that are being removed no longer count, although they may
    # run until their drain ends: desired and surge limit the pods that fill a place.
    capacity = max(0, bounds.most - len(stay))
    older = len([pod for pod in stay if pod.revision != update])
    add_current = min(missing, capacity)
    # Older pods have priority in the capacity that is left: they keep up the capacity that serves.
    add_update = min(bounds.desired - (len(stay) - older), capacity - add_current)
    return PodChanges(tuple(remove), add_current, max(0, add_update))


def hold(pods: Sequence[PodState], bounds: Limits, current: str | None) -> PodChanges:
    """Scale only: pods keep their revision, and missing pods are added from `current`.

    A pool that is held in the middle of a rollout keeps its surge pods.
    """
    # More than one revision: the pool was held in the middle of a rollout.
    most = bounds.most if len({pod.revision for pod in pods}) > 1 else bounds.desired
    remove = sorted(pods, key=lambda pod: _removal_order(pod, current))[: len(pods) - most]
    if len(pods) <= most:
        remove = []
    missing = bounds.desired - len(pods) if current is not None else 0
    return PodChanges(tuple(remove), add_current=max(0, missing))


def has_served(pods: Sequence[PodState], bounds: Limits, update: str) -> bool:
    """Whether the update revision has enough available pods to carry the pool by itself.

    It then becomes the current revision.
    """
    available = _available_count([pod for pod in pods if pod.revision == update])
    return bounds.desired == 0 or available >= max(1, bounds.fewest_ready)


def index_of(pod: PodState) -> int:
    """The last part of the name `pool-revision-index`; -1 for another form of name."""
    tail = pod.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def _older_to_remove(
    old: Sequence[PodState],
    new: Sequence[PodState],
    floor: int,
    bounds: Limits,
    gate: Gate,
) -> list[PodState]:
    """Older pods to remove, unready ones first; `bounds.fewest_ready` pods stay available."""
    removable = len(old) - floor
    spare = _available_count(old) + _available_count(new) - bounds.fewest_ready
    surplus = len(old) + len(new) - bounds.most
    keep: Collection[str] = gate.keep
    if not gate.is_open:
        # A first new pod needs room before any older pod may go. A scale-down applies at once, and
        # then also to the pods in `keep`.
        removable, keep = min(removable, max(surplus, 0 if new else surplus + 1)), ()
    remove: list[PodState] = []
    for pod in _first_to_remove(old, len(old)):
        if len(remove) >= removable:
            break
        if pod.name in keep or (pod.ready and spare <= 0):
            continue
        # An unready pod is no loss of capacity and needs no spare one.
        spare -= pod.available
        remove.append(pod)
    return remove


def _first_to_remove(pods: Sequence[PodState], count: int) -> list[PodState]:
    """The `count` pods that are removed first: unscheduled, then unready, then highest index."""
    return sorted(pods, key=lambda pod: _removal_order(pod, None))[: max(0, count)]


def _removal_order(pod: PodState, current: str | None) -> tuple[bool, bool, bool, int, str]:
    is_other = current is not None and pod.revision != current
    return (pod.scheduled, pod.ready, not is_other, -index_of(pod), pod.name)


def _available_count(pods: Sequence[PodState]) -> int:
    return len([pod for pod in pods if pod.available])


def _pod_count(value: int | str | None, default: str, desired: int, *, up: bool) -> int:
    value = default if value is None else value
    if isinstance(value, int):
        return max(0, value)
    hundredths = int(value.removesuffix("%")) * desired
    return math.ceil(hundredths / 100) if up else hundredths // 100
