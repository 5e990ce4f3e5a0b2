"""What waits at the other replicas of an EPP, and what they are told. Pure.

So the important go first in the whole fleet, tenants share it, and its limits hold for all replicas
together: a request goes only if no other replica has one that comes before it and needs the same
pods. In a partition each replica is alone, with its part of the limits, until it hears of the
others again.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple


class Group(NamedTuple):
    """Requests that go before each other only by tenant and time."""

    model: str | None
    priority: int
    is_split: bool
    """Whether they need a prefill pod."""


class Share(NamedTuple):
    """What waits of one group at one replica."""

    requests: int = 0
    size: int = 0
    """Bytes of their bodies."""
    turn: float = 0.0
    """The virtual time at which the next of them begins: `queue`."""


class Went(NamedTuple):
    """A request that went at one replica."""

    tenant: str
    cost: float
    """In requests or tokens."""


NOTHING: Final = Share()


class WaitingElsewhere:
    """What waits, here and at each other replica."""

    def __init__(self) -> None:
        self.own: dict[Group, Share] = {}
        """Only groups with requests."""
        self.on_change: Callable[[Group, Share, Went | None], None] = lambda *_: None
        """Called with each change of `own`, and with the request that went by it."""
        self.on_news: Callable[[Group, Share, Went | None], None] = lambda *_: None
        """The same of another replica."""
        self.part: Callable[[], float] = lambda: 1.0
        """The part of the fleet's limits that the connected replicas have together: below 1 while
        others cannot be reached."""
        self._others: dict[str, dict[Group, Share]] = {}
        """By replica; only groups with requests."""
        self._went: dict[str, dict[Group, int]] = {}
        """Of the same groups, how many requests went since."""

    def tell(self, group: Group, share: Share, went: Went | None = None) -> None:
        """`share` of `group` waits here now, after `went` has gone; None: none went."""
        _put(self.own, group, share)
        self.on_change(group, share, went)

    def learn(self, peer: str, group: Group, share: Share, went: Went | None = None) -> None:
        """The same of `peer`."""
        _put(self._others.setdefault(peer, {}), group, share)
        counts = self._went.setdefault(peer, {})
        if not share.requests:
            counts.pop(group, None)
        elif went is not None:
            counts[group] = counts.get(group, 0) + 1
        self.on_news(group, share, went)

    def forget(self, peer: str) -> None:
        """Nothing is known of `peer` any more."""
        self._others.pop(peer, None)
        self._went.pop(peer, None)

    def gone_before(self, group: Group, turn: float) -> int | None:
        """How many requests have gone of those that wait elsewhere and come before one of `group`
        whose turn is at the virtual time `turn`; None: none comes before it."""
        gone: int | None = None
        for peer, groups in self._others.items():
            for other, share in groups.items():
                if _is_before(other, share.turn, group, turn):
                    gone = (gone or 0) + self._went[peer].get(other, 0)
        return gone

    def latest_turn(self, group: Group) -> float:
        """The virtual time of `group` at the replica that is the furthest; 0 if it waits nowhere
        else."""
        turns = (share.turn for other, share in self._all() if other == group)
        return max(turns, default=0.0)

    @property
    def replicas(self) -> int:
        """Those of which it is known what waits there, and this one."""
        return 1 + len(self._others)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits elsewhere."""
        return not any(self._others.values())

    def has(self, group: Group, least: int | None = None) -> bool:
        """Whether requests wait elsewhere that need the same as `group`. `least`: their priority at
        least; None: any."""
        return any(
            other.model == group.model
            and other.is_split == group.is_split
            and (least is None or other.priority >= least)
            for other, _ in self._all()
        )

    def total(self, lowest: int | None = None, highest: int | None = None) -> Share:
        """What waits elsewhere, of the priorities from `lowest` to `highest`; None: without a
        bound. It has no turn."""
        requests = size = 0
        for group, share in self._all():
            if (lowest is None or group.priority >= lowest) and (
                highest is None or group.priority <= highest
            ):
                requests += share.requests
                size += share.size
        return Share(requests, size)

    def _all(self) -> Iterator[tuple[Group, Share]]:
        return (item for groups in self._others.values() for item in groups.items())


def _is_before(group: Group, turn: float, than: Group, than_turn: float) -> bool:
    if group.model != than.model or group.is_split != than.is_split:
        return False
    if group.priority != than.priority:
        return group.priority > than.priority
    return turn < than_turn


def _put(groups: dict[Group, Share], group: Group, share: Share) -> None:
    if share.requests > 0:
        groups[group] = share
    else:
        groups.pop(group, None)
