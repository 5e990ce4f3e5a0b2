"""What waits at the other replicas of an EPP, and what they are told. Pure.

So the important go first in the whole fleet, and its limits hold for all replicas together: a
request goes only if none of a higher priority, which needs the same pods, waits at any of them. In
a partition each replica is alone, until it hears of the others again.
"""

from collections.abc import Callable
from typing import NamedTuple


class Group(NamedTuple):
    """Requests that go before each other only by tenant and time."""

    model: str | None
    priority: int
    is_split: bool
    """Whether they need a prefill pod."""


class WaitingElsewhere:
    """How many requests wait, here and at each other replica."""

    def __init__(self) -> None:
        self.own: dict[Group, int] = {}
        """Only groups with requests."""
        self.on_change: Callable[[Group, int], None] = lambda *_: None
        """Called with each change of `own`."""
        self._others: dict[str, dict[Group, int]] = {}
        """By replica; only groups with requests."""

    def count(self, group: Group, change: int) -> None:
        """`change` more requests of `group` wait here."""
        requests = self.own.get(group, 0) + change
        _put(self.own, group, requests)
        self.on_change(group, requests)

    def learn(self, peer: str, group: Group, requests: int) -> None:
        """So many requests of `group` wait at `peer` now."""
        _put(self._others.setdefault(peer, {}), group, requests)

    def forget(self, peer: str) -> None:
        """Nothing is known of `peer` any more."""
        self._others.pop(peer, None)

    def has_more_important(self, group: Group) -> bool:
        """Whether a request waits elsewhere that goes before those of `group`."""
        return any(
            other.model == group.model
            and other.is_split == group.is_split
            and other.priority > group.priority
            for groups in self._others.values()
            for other in groups
        )

    def all_requests(self) -> int:
        """Requests that wait elsewhere."""
        return sum(sum(groups.values()) for groups in self._others.values())

    def requests(self, priority: int) -> int:
        """Requests of `priority` that wait elsewhere."""
        return sum(
            requests
            for groups in self._others.values()
            for group, requests in groups.items()
            if group.priority == priority
        )


def _put(groups: dict[Group, int], group: Group, requests: int) -> None:
    if requests > 0:
        groups[group] = requests
    else:
        groups.pop(group, None)
