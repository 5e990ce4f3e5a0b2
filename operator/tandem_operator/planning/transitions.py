"""Which changes of a status are worth a Kubernetes event. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..conditions import ConditionType, Reason
from .progress import condition

_NORMAL: Final = "Normal"
_WARNING: Final = "Warning"

_TOLD: Final[dict[tuple[str, str], Literal["Normal", "Warning"]]] = {
    (ConditionType.READY, "True"): _NORMAL,
    (ConditionType.STALLED, "True"): _WARNING,
    (ConditionType.UPDATE_AVAILABLE, "True"): _NORMAL,
    (ConditionType.TRANSPORT_VERIFIED, "True"): _NORMAL,
    (ConditionType.PODS_READY, Reason.UNSCHEDULABLE): _WARNING,
    (ConditionType.PODS_READY, Reason.PODS_FAIL): _WARNING,
    (ConditionType.PEER_READY, Reason.PEER_MISSING): _WARNING,
    (ConditionType.PROGRESSING, Reason.ROLLING_OUT): _NORMAL,
    (ConditionType.PROGRESSING, Reason.WAITING_FOR_PEER): _NORMAL,
    (ConditionType.PROGRESSING, Reason.PAUSED): _NORMAL,
    (ConditionType.PROGRESSING, Reason.COMPLETE): _NORMAL,
    (ConditionType.DRAINING, Reason.DRAIN_STUCK): _WARNING,
}
"""Condition and what it says, status or reason → the event's type."""


@dataclass(frozen=True)
class Event:
    """One Kubernetes event about a pool."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def transitions(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Event, ...]:
    """What is worth an event between two statuses of a pool; nothing when no condition changed."""
    found = dict.fromkeys(_events(old, new))
    return tuple(found)


def _events(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Event]:
    for now in new.get("conditions", ()):
        before = condition(old, now["type"])
        for part in ("status", "reason"):
            told = _TOLD.get((now["type"], now[part]))
            if told is not None and before.get(part) != now[part]:
                yield Event(told, now["reason"], now["message"])
        if now["type"] == ConditionType.READY and before.get("status") == "True" != now["status"]:
            yield Event(_WARNING, now["reason"], now["message"])
