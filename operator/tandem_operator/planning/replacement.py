"""When a pod that is over is replaced: at once the first time, later each time it ends early.

Pods are never restarted in place, so what a kubelet does for containers is done here for pods: a
command line that no engine takes would otherwise be scheduled, pulled and loaded in a circle. The
count travels in an annotation of the pods themselves: nothing else remembers it.
"""

from collections.abc import Iterable
from typing import Final

from ..observed import PodState

_EARLY: Final = 600.0
"""Seconds of life after which an end is news, not the same failure again."""
_FIRST_DELAY: Final = 10.0
_LONGEST_DELAY: Final = 300.0
"""A kubelet's, for containers."""


def due(pod: PodState) -> float:
    """Unix seconds from which a pod that is over is replaced."""
    if pod.attempt == 0 or not _early(pod):
        return 0.0
    delay = _FIRST_DELAY * 2.0 ** min(pod.attempt - 1, 10)
    return (pod.ended or 0.0) + min(delay, _LONGEST_DELAY)


def rests(pod: PodState, now: float) -> bool:
    """Whether it is over and keeps its place until its replacement is due."""
    return pod.over and not pod.leaving and now < due(pod)


def next_attempts(replaced: Iterable[PodState]) -> list[int]:
    """The attempts of the pods that come instead, most failed first."""
    return sorted((pod.attempt + 1 for pod in replaced if _early(pod)), reverse=True)


def _early(pod: PodState) -> bool:
    return pod.ended is not None and pod.ended - pod.created < _EARLY
