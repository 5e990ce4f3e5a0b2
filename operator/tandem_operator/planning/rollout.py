"""How many pods of which revision come and go in one pass over a pool. Pure arithmetic.

    desired D, surge S, unavailable U        N, O: pods of the update revision, of older ones
    floor   F = max(0, D - U - ready N)      older pods that are still needed
    leave   older pods above F, as long as D - U stay ready
    come    min(F - O, room) of the current revision, then min(D - N, room) of the update revision
    room    D + S - all

An older pod that is lost leaves O below F and so comes back from the current revision: nobody has
seen the new one serve yet. Revisions that are neither current nor update never served: their pods
leave at once unless they are ready, and never come back.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ..observed import PodState
from ..resources.spec import Rollout

MAX_SURGE: Final = "25%"
MAX_UNAVAILABLE: Final = "25%"
"""A Deployment's. A single replica is replaced by surge; a cluster without a spare accelerator
wants `maxSurge: 0, maxUnavailable: 1`."""
PROGRESS_DEADLINE: Final = 2400.0
"""Seconds; above the 1800 an engine may take to load its weights."""


@dataclass(frozen=True)
class Limits:
    """How far a pool may be from its number of pods while it rolls."""

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
    """What the rest of the set lets the older pods of a pool do."""

    is_open: bool = True
    """False: older pods leave only to make room for a first new one."""
    keep: Collection[str] = ()
    """Names of pods that stay, the last ones that others still pair with."""


@dataclass(frozen=True)
class Moves:
    """What comes and goes."""

    leave: tuple[PodState, ...] = ()
    come_current: int = 0
    come_update: int = 0


OPEN: Final = Gate()


def limits(rollout: Rollout, desired: int) -> Limits:
    """Percentages of `desired`: surge rounds up, unavailable down; one of them is at least 1.

    Raises ValueError for text that is no percentage.
    """
    surge = _share(rollout.max_surge, MAX_SURGE, desired, up=True)
    unavailable = _share(rollout.max_unavailable, MAX_UNAVAILABLE, desired, up=False)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Limits(desired, surge, min(unavailable, desired))


def roll(
    pods: Sequence[PodState], within: Limits, current: str | None, update: str, gate: Gate = OPEN
) -> Moves:
    """Towards `desired` pods of `update`. `pods` are those that count; `current` is None when no
    revision served yet."""
    new = [pod for pod in pods if pod.revision == update]
    failed = [pod for pod in pods if pod.revision not in (update, current) and not pod.ready]
    old = [pod for pod in pods if pod not in new and pod not in failed]
    leave = [*failed, *_last(new, len(new) - within.desired)]
    new = [pod for pod in new if pod not in leave]
    floor = max(0, within.fewest_ready - _ready(new))
    leave += _older(old, new, floor, within, gate)
    stay = [pod for pod in (*new, *old) if pod not in leave]
    # A smaller desired number can leave too many of both: unready new ones serve nobody yet.
    unready = [pod for pod in new if not pod.ready]
    leave += _last(unready, min(len(stay) - within.most, len(unready)))
    stay = [pod for pod in stay if pod not in leave]
    room = max(0, within.most - len(stay))
    older = len([pod for pod in stay if pod.revision != update])
    come_current = 0
    if current is not None and current != update:
        come_current = min(max(0, floor - older), room)
    come_update = min(within.desired - (len(stay) - older), room - come_current)
    return Moves(tuple(leave), come_current, max(0, come_update))


def hold(pods: Sequence[PodState], within: Limits, current: str | None) -> Moves:
    """Only the number changes: pods keep their revision, and what is missing comes of `current`.

    In mid-rollout the surge stays.
    """
    most = within.most if len({pod.revision for pod in pods}) > 1 else within.desired
    leave = sorted(pods, key=lambda pod: _leaving_order(pod, current))[: len(pods) - most]
    if len(pods) <= most:
        leave = []
    missing = within.desired - len(pods) if current is not None else 0
    return Moves(tuple(leave), come_current=max(0, missing))


def has_served(pods: Sequence[PodState], within: Limits, update: str) -> bool:
    """Whether the update revision carries the pool by itself and so becomes the current one."""
    ready = _ready([pod for pod in pods if pod.revision == update])
    return within.desired == 0 or ready >= max(1, within.fewest_ready)


def index_of(pod: PodState) -> int:
    """The last part of `pool-revision-index`; of another name, -1."""
    tail = pod.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1


def _older(
    old: Sequence[PodState],
    new: Sequence[PodState],
    floor: int,
    within: Limits,
    gate: Gate,
) -> list[PodState]:
    """Older pods that leave: unready ones first, and never so that too few stay ready."""
    above = len(old) - floor
    spare = _ready(old) + _ready(new) - within.fewest_ready
    surplus = len(old) + len(new) - within.most
    kept: Collection[str] = gate.keep
    if not gate.is_open:
        # One pod must be able to come before any may go; and a smaller number holds at once.
        above, kept = min(above, max(surplus, 0 if new else surplus + 1)), ()
    leave: list[PodState] = []
    for pod in _last(old, len(old)):
        if len(leave) >= above:
            break
        if pod.name in kept or (pod.ready and spare <= 0):
            continue
        spare -= pod.ready
        leave.append(pod)
    return leave


def _last(pods: Sequence[PodState], count: int) -> list[PodState]:
    """The `count` that go first: unscheduled, unready, highest index."""
    return sorted(pods, key=lambda pod: _leaving_order(pod, None))[: max(0, count)]


def _leaving_order(pod: PodState, current: str | None) -> tuple[bool, bool, bool, int, str]:
    other = current is not None and pod.revision != current
    return (pod.scheduled, pod.ready, not other, -index_of(pod), pod.name)


def _ready(pods: Sequence[PodState]) -> int:
    return len([pod for pod in pods if pod.ready])


def _share(value: int | str | None, default: str, desired: int, *, up: bool) -> int:
    value = default if value is None else value
    if isinstance(value, int):
        return max(0, value)
    part = int(value.removesuffix("%")) * desired
    return math.ceil(part / 100) if up else part // 100
