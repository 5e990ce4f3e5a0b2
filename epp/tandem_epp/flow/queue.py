"""The requests of one model that wait, and which of them goes next. Pure: no clock, no task.

Bands of a higher priority go first, strictly. Within a band tenants get equal shares, and within a
tenant the request that came first goes first, or the one whose time ends first.

The shares are those of start-time fair queueing (Goyal, Vin, Cheng, *Start-time Fair Queuing*,
SIGCOMM 1996): each request begins at the virtual time at which its tenant's last one ended, or now
if that is later, and lasts its cost; the earliest beginning goes next. A tenant thus gets at most
one request of the largest cost more than another one while both wait, and none has to be known
beforehand. With a cost of 1 for each request tenants take turns.

Replicas of an EPP share the virtual time: what one lets go is charged to its tenant at the others,
too (`charge`), and a band that only begins to wait begins where the others are.
"""

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

_FEW: Final = 64
"""Left-overs in a list that are not worth a look."""
_NUMBERS: Final = count(1)
"""Of entries of lists, in the order in which they were made."""
_MOST_DEBTS: Final = 10_000
"""Tenants none of whose requests waits that are remembered: names are invented easily."""


class Waiting:
    """A request that waits."""

    __slots__ = ("arrived", "cost", "deadline", "number", "order", "priority", "size", "tenant")

    def __init__(
        self,
        priority: int,
        tenant: str,
        arrived: float,
        deadline: float,
        *,
        size: int = 0,
        cost: float = 1.0,
    ) -> None:
        """`arrived` and `deadline` are of one clock, in seconds; `size` is in bytes, and `cost` in
        requests or tokens, above 0."""
        self.priority, self.tenant = priority, tenant
        self.arrived, self.deadline = arrived, deadline
        self.size, self.cost = size, cost
        self.order = arrived
        """The lowest of its tenant goes first; not changed while it waits."""
        self.number = 0
        """Of its entries in the lists of the queue in which it is; 0: it is in none."""


W = TypeVar("W", bound=Waiting)


class _Tenant(Generic[W]):
    """The requests of one tenant in one band."""

    __slots__ = ("count", "heap", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        """The virtual time at which its next request begins."""
        self.heap: list[tuple[float, int, W]] = []
        """Also those that are gone, until they come first."""
        self.count = 0
        """Those that are not."""


class _Band(Generic[W]):
    """The tenants of one priority."""

    def __init__(self, began: float) -> None:
        self.count = 0
        self.began = began
        """The virtual time of the whole fleet at which the one of this band is 0."""
        self.largest = 0.0
        """The highest cost of a request so far."""
        self._now = 0.0
        """The virtual time: the beginning of the latest request that went."""
        self._tenants: dict[str, _Tenant[W]] = {}
        """Those with requests."""
        self._order: list[tuple[float, int, _Tenant[W]]] = []
        """By `start`; also entries that count no longer: of tenants that have no requests any more,
        or begin later now."""
        self._debts: dict[str, float] = {}
        """Tenant without requests → the virtual time at which its last one ends. Times that are
        over may be left out."""
        self._worth_a_look = _FEW
        """Debts from which on those that are over are forgotten."""

    def add(self, item: W, turn: float) -> None:
        """`turn`: where the whole fleet is."""
        self.largest = max(self.largest, item.cost)
        if not self.count:
            # While nothing waited here, the others went on.
            self._now = max(self._now, turn - self.began)
        tenant = self._tenants.get(item.tenant)
        if tenant is None:
            start = max(self._now, self._debts.pop(item.tenant, 0.0))
            tenant = self._tenants[item.tenant] = _Tenant(start)
            heappush(self._order, (start, next(_NUMBERS), tenant))
        item.number = next(_NUMBERS)
        heappush(tenant.heap, (item.order, item.number, item))
        tenant.count += 1
        self.count += 1

    def first(self) -> W:
        """The request that goes next. The band has one."""
        return self._first_tenant().heap[0][2]

    def all(self) -> list[W]:
        """Those that wait; of one tenant in their order."""
        entries = [entry for tenant in self._tenants.values() for entry in tenant.heap]
        return [
            entry[2] for entry in sorted(filter(_is_inside, entries), key=lambda each: each[:2])
        ]

    @property
    def now(self) -> float:
        """The virtual time of the whole fleet at which the latest request that went began."""
        return self.began + self._now

    @property
    def turn(self) -> float:
        """The virtual time of the whole fleet at which the next one begins."""
        return self.began + self._first_tenant().start

    def charge(self, name: str, cost: float) -> None:
        """A request of this tenant went at another replica."""
        self.largest = max(self.largest, cost)
        if (tenant := self._tenants.get(name)) is None:
            self._owe(name, max(self._now, self._debts.get(name, 0.0)) + cost)
            return
        tenant.start += cost
        heappush(self._order, (tenant.start, next(_NUMBERS), tenant))
        # Who comes now begins where the others are.
        self._now = max(self._now, self._first_tenant().start - self.largest)
        self._forget(tenant)

    def take_first(self) -> W:
        """Remove the request that goes next; its tenant has had it."""
        tenant = self._first_tenant()
        item = heappop(tenant.heap)[2]
        heappop(self._order)
        self._now = tenant.start
        tenant.start += item.cost
        if tenant.count > 1:
            heappush(self._order, (tenant.start, next(_NUMBERS), tenant))
        self._drop(item, tenant)
        return item

    def remove(self, item: W) -> None:
        """It leaves without having gone."""
        self._drop(item, self._tenants[item.tenant])

    def _drop(self, item: W, tenant: _Tenant[W]) -> None:
        item.number = 0
        tenant.count -= 1
        self.count -= 1
        if not tenant.count:
            del self._tenants[item.tenant]
            self._owe(item.tenant, tenant.start)
        self._forget(tenant)

    def _forget(self, tenant: _Tenant[W]) -> None:
        """Bound what is kept beside the requests that wait."""
        if len(tenant.heap) > _FEW + 2 * tenant.count:
            tenant.heap = [entry for entry in tenant.heap if _is_inside(entry)]
            heapify(tenant.heap)
        if len(self._order) > _FEW + 2 * len(self._tenants):
            self._order = [entry for entry in self._order if _counts(entry)]
            heapify(self._order)

    def _owe(self, name: str, end: float) -> None:
        """The last request of this tenant, none of which waits, ends at the virtual time `end`."""
        if name in self._debts or len(self._debts) < _MOST_DEBTS:
            self._debts[name] = end
        if len(self._debts) > self._worth_a_look:
            self._debts = {name: end for name, end in self._debts.items() if end > self._now}
            self._worth_a_look = _FEW + 2 * len(self._debts)

    def _first_tenant(self) -> _Tenant[W]:
        while not _counts(self._order[0]):
            heappop(self._order)
        tenant = self._order[0][2]
        while not _is_inside(tenant.heap[0]):
            heappop(tenant.heap)
        return tenant


def _counts(entry: tuple[float, int, _Tenant[W]]) -> bool:
    start, _, tenant = entry
    return tenant.count > 0 and tenant.start == start


def _is_inside(entry: tuple[float, int, W]) -> bool:
    """Whether the entry's request has not left the queue since, also not for another one."""
    return entry[2].number == entry[1]


class FlowQueue(Generic[W]):
    """The bands of one model."""

    def __init__(self) -> None:
        self._bands: dict[int, _Band[W]] = {}
        """By priority; only those with requests."""
        self._resting: dict[int, _Band[W]] = {}
        """Those that had some: what their tenants got counts while the queue is kept."""
        self._deadlines: list[tuple[float, int, W]] = []
        """Also those that are gone, until they come first."""

    def __len__(self) -> int:
        return sum(band.count for band in self._bands.values())

    def add(self, item: W, turn: float = 0.0) -> None:
        """`item` waits from now on. `turn`: the virtual time of the whole fleet, if it is the first
        of its band."""
        if (band := self._bands.get(item.priority)) is None:
            band = self._resting.pop(item.priority, None) or _Band(turn)
            self._bands[item.priority] = band
        band.add(item, turn)
        heappush(self._deadlines, (item.deadline, item.number, item))
        self._forget_gone()

    @property
    def priorities(self) -> list[int]:
        """Those of which requests wait or waited."""
        return [*self._bands, *self._resting]

    def first(self) -> W | None:
        """The request that goes next; None: none waits."""
        return self._bands[max(self._bands)].first() if self._bands else None

    def take_first(self) -> W:
        """Let the request go that is next."""
        item = self._bands[max(self._bands)].take_first()
        self._close(item.priority)
        return item

    def turn(self, priority: int) -> float:
        """The virtual time of the whole fleet at which the next request of `priority` begins; 0 if
        none waits."""
        return band.turn if (band := self._bands.get(priority)) is not None else 0.0

    def largest_cost(self, priority: int) -> float:
        """The highest cost of a request of `priority` so far; 0 if none waits."""
        return band.largest if (band := self._bands.get(priority)) is not None else 0.0

    def charge(self, priority: int, tenant: str, cost: float) -> None:
        """A request of this tenant went at another replica."""
        band = self._bands.get(priority) or self._resting.get(priority)
        if band is not None:
            band.charge(tenant, cost)

    def keep_up(self, priority: int, turn: float) -> None:
        """The next request of `priority` begins at the virtual time `turn` at the earliest."""
        if (band := self._bands.get(priority)) is not None:
            band.began += max(0.0, turn - band.turn)

    def restart(self, priority: int) -> list[W]:
        """Remove and return all requests of `priority`, those of a tenant in their order, and
        forget what tenants got: those that are added now get equal shares from now on."""
        band = self._bands.pop(priority, None) or self._resting.get(priority)
        if band is None:
            return []
        items = band.all()
        for item in items:
            item.number = 0
        self._resting[priority] = _Band(band.now)
        self._forget_gone()
        return items

    def remove(self, item: W) -> None:
        """`item`, which is in this queue, waits no longer, and has not gone. Without effect if it
        is gone already."""
        if item.number:
            self._bands[item.priority].remove(item)
            self._close(item.priority)

    def ahead(self, priority: int) -> int:
        """Requests that go before one of `priority` that comes now, at most."""
        return sum(band.count for own, band in self._bands.items() if own >= priority)

    def expired(self, now: float) -> list[W]:
        """Remove and return those whose time ends until `now`."""
        ended = []
        while (first := next(iter(self._deadlines), None)) is not None:
            is_inside = _is_inside(first)
            if is_inside and first[0] > now:
                break
            heappop(self._deadlines)
            if is_inside:
                self.remove(first[2])
                ended.append(first[2])
        return ended

    def all(self) -> list[W]:
        """All that wait."""
        return [entry[2] for entry in self._deadlines if _is_inside(entry)]

    def _close(self, priority: int) -> None:
        if not self._bands[priority].count:
            self._resting[priority] = self._bands.pop(priority)

    def _forget_gone(self) -> None:
        """Those that are gone are at most as many as those that wait, and `_FEW`."""
        if len(self._deadlines) > _FEW + 2 * len(self):
            self._deadlines = [entry for entry in self._deadlines if _is_inside(entry)]
            heapify(self._deadlines)
