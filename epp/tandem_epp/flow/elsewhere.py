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
    tokens: float
    """Of its prompt and expected answer, above 0."""


NOTHING: Final = Share()
Kind = tuple[str | None, bool]
"""Model, and whether a prefill pod is needed: requests that need the same pods."""


class _Other:
    """What waits of one group at one replica."""

    __slots__ = ("share", "went")

    def __init__(self, share: Share) -> None:
        self.share = share
        self.went = 0
        """Requests that went since any waits."""


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
        self._replicas: dict[str, set[Group]] = {}
        """Those that told something; their groups with requests."""
        self._others: dict[Kind, dict[tuple[str, Group], _Other]] = {}
        """By replica and group; only groups with requests. An admission reads those of its kind."""
        self._totals: dict[int, Share] = {}
        """Priority → all that waits of it at other replicas, without a turn."""

    def tell(self, group: Group, share: Share, went: Went | None = None) -> None:
        """`share` of `group` waits here now, after `went` has gone; None: none went."""
        if share.requests > 0:
            self.own[group] = share
        else:
            self.own.pop(group, None)
        self.on_change(group, share, went)

    def learn(self, peer: str, group: Group, share: Share, went: Went | None = None) -> None:
        """The same of `peer`."""
        other = self._put(peer, group, share)
        if other is not None and went is not None:
            other.went += 1
        self.on_news(group, share, went)

    def forget(self, peer: str) -> None:
        """Nothing is known of `peer` any more."""
        for group in tuple(self._replicas.get(peer, ())):
            self._put(peer, group, NOTHING)
        self._replicas.pop(peer, None)

    def gone_before(self, group: Group, turn: float) -> int | None:
        """How many requests have gone of those that wait elsewhere and come before one of `group`
        whose turn is at the virtual time `turn`; None: none comes before it."""
        gone: int | None = None
        for other, found in self._alike(group):
            if other.priority > group.priority or (
                other.priority == group.priority and found.share.turn < turn
            ):
                gone = (gone or 0) + found.went
        return gone

    def latest_turn(self, group: Group) -> float:
        """The virtual time of `group` at the replica that is the furthest; 0 if it waits nowhere
        else."""
        turns = (found.share.turn for other, found in self._alike(group) if other == group)
        return max(turns, default=0.0)

    @property
    def replicas(self) -> int:
        """Those of which it is known what waits there, and this one."""
        return 1 + len(self._replicas)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits elsewhere."""
        return not self._others

    def has(self, group: Group, least: int | None = None) -> bool:
        """Whether requests wait elsewhere that need the same as `group`. `least`: their priority at
        least; None: any."""
        return any(least is None or other.priority >= least for other, _ in self._alike(group))

    def total(self, lowest: int | None = None, highest: int | None = None) -> Share:
        """What waits elsewhere, of the priorities from `lowest` to `highest`; None: without a
        bound. It has no turn."""
        requests = size = 0
        for priority, share in self._totals.items():
            if (lowest is None or priority >= lowest) and (highest is None or priority <= highest):
                requests += share.requests
                size += share.size
        return Share(requests, size)

    def _alike(self, group: Group) -> Iterator[tuple[Group, _Other]]:
        """What waits elsewhere and needs the same as `group`."""
        found = self._others.get((group.model, group.is_split), {})
        return ((other, each) for (_, other), each in found.items())

    def _put(self, peer: str, group: Group, share: Share) -> _Other | None:
        """`share` of `group` waits at `peer`; returns it, None: it is none."""
        groups = self._replicas.setdefault(peer, set())
        kind = group.model, group.is_split
        others = self._others.setdefault(kind, {})
        other, before = others.get((peer, group)), NOTHING
        if other is not None:
            before, other.share = other.share, share
        if share.requests > 0:
            groups.add(group)
            other = others.setdefault((peer, group), other or _Other(share))
        else:
            share, other = NOTHING, None
            groups.discard(group)
            others.pop((peer, group), None)
            if not others:
                del self._others[kind]
        self._count(group.priority, share.requests - before.requests, share.size - before.size)
        return other

    def _count(self, priority: int, requests: int, size: int) -> None:
        """So many more wait of `priority`."""
        total = self._totals.get(priority, NOTHING)
        total = Share(total.requests + requests, total.size + size)
        if total.requests:
            self._totals[priority] = total
        else:
            self._totals.pop(priority, None)
