"""Which of the waiting requests goes next."""

from collections import Counter
from itertools import count, groupby

from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.flow.queue import FlowQueue, Waiting

NUMBERS = count()


def waiting(
    tenant: str = "a", priority: int = 0, *, cost: float = 1.0, deadline: float = 1e9
) -> Waiting:
    return Waiting(priority, tenant, float(next(NUMBERS)), deadline, cost=cost)


def drained(queue: FlowQueue) -> list[Waiting]:
    gone = []
    while queue.first() is not None:
        first = queue.first()
        gone.append(queue.take_first())
        assert gone[-1] is first
    return gone


ITEMS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.floats(1.0, 50.0)), max_size=40
)


@given(ITEMS)
def test_a_higher_priority_goes_first(items: list[tuple[str, int, float]]) -> None:
    queue = FlowQueue()
    for tenant, priority, cost in items:
        queue.add(waiting(tenant, priority, cost=cost))
    priorities = [item.priority for item in drained(queue)]
    assert priorities == sorted(priorities, reverse=True)
    assert len(priorities) == len(items)


@given(ITEMS)
def test_a_tenants_requests_go_as_they_came(items: list[tuple[str, int, float]]) -> None:
    queue = FlowQueue()
    for tenant, priority, cost in items:
        queue.add(waiting(tenant, priority, cost=cost))
    by_flow = sorted(drained(queue), key=lambda item: (item.priority, item.tenant))
    for _, group in groupby(by_flow, key=lambda item: (item.priority, item.tenant)):
        arrived = [item.arrived for item in group]
        assert arrived == sorted(arrived)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(1.0, 20.0)), min_size=4, max_size=60))
def test_tenants_that_wait_get_equal_shares(items: list[tuple[str, float]]) -> None:
    """Goyal, theorem 1: of two tenants that wait all the time, what each gets differs by no more
    than the largest cost of both."""
    queue = FlowQueue()
    left = Counter(tenant for tenant, _ in items)
    for tenant, cost in items:
        queue.add(waiting(tenant, cost=cost))
    most = max(cost for _, cost in items)
    got = dict.fromkeys(left, 0.0)
    while all(left.values()) and queue.first() is not None:
        item = queue.take_first()
        got[item.tenant] += item.cost
        left[item.tenant] -= 1
        assert max(got.values()) - min(got.values()) <= 2 * most


def test_a_tenant_that_comes_late_has_no_claim_on_the_past() -> None:
    queue = FlowQueue()
    for _ in range(10):
        queue.add(waiting("old"))
    for _ in range(5):
        queue.take_first()
    for _ in range(3):
        queue.add(waiting("new"))
    order = "".join(item.tenant[0] for item in drained(queue))
    assert order in {"nononooo", "onononoo"}


def test_a_tenant_that_leaves_and_comes_again_gains_nothing() -> None:
    """A tenant that sends one when the last one went gets its share, and not more."""
    queue = FlowQueue()
    for _ in range(20):
        queue.add(waiting("patient"))
    queue.add(waiting("eager"))
    gone = []
    for _ in range(10):
        item = queue.take_first()
        gone.append(item.tenant)
        if item.tenant == "eager":
            queue.add(waiting("eager"))
    assert Counter(gone) == {"patient": 5, "eager": 5}


def test_the_time_that_ends_first_goes_first_where_that_is_asked() -> None:
    queue = FlowQueue()
    for deadline in (30.0, 10.0, 20.0):
        item = waiting(deadline=deadline)
        item.order = deadline
        queue.add(item)
    assert [item.deadline for item in drained(queue)] == [10.0, 20.0, 30.0]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("ab"), st.integers(-1, 1), st.integers(1, 9)),
        st.tuples(st.just("take")),
        st.tuples(st.just("remove"), st.integers(0, 99)),
        st.tuples(st.just("expire"), st.integers(1, 9)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_request_leaves_once(steps: list[tuple[str, ...]]) -> None:
    """Whatever happens, in whatever order: the queue has those that did not leave, and no other."""
    queue, inside = FlowQueue(), list[Waiting]()
    for name, *values in steps:
        if name == "add":
            tenant, priority, deadline = values
            item = waiting(str(tenant), int(priority), deadline=float(deadline))
            queue.add(item)
            inside.append(item)
        elif name == "take" and inside:
            item = queue.take_first()
            assert item.priority == max(other.priority for other in inside)
            inside.remove(item)
        elif name == "remove" and inside:
            item = inside.pop(int(values[0]) % len(inside))
            queue.remove(item)
            queue.remove(item)
        elif name == "expire":
            ended = queue.expired(float(values[0]))
            assert {*ended} == {item for item in inside if item.deadline <= float(values[0])}
            inside = [item for item in inside if item.deadline > float(values[0])]
        assert len(queue) == len(inside)
        assert queue.ahead(0) == sum(item.priority >= 0 for item in inside)
    assert {*queue.all()} == {*inside}


def test_what_leaves_keeps_no_memory() -> None:
    queue = FlowQueue()
    queue.add(waiting("first"))
    for number in range(5000):
        item = waiting(f"tenant {number}")
        queue.add(item)
        queue.remove(item)
        item = waiting("first")
        queue.add(item)
        queue.remove(item)
    kept = sum(map(len, _lists(queue)))
    assert kept < 1000


def _lists(value: object, depth: int = 0) -> list[list[object] | dict[object, object]]:
    """The lists and mappings within the queue's own objects."""
    found: list[list[object] | dict[object, object]] = []
    if isinstance(value, list | dict):
        found.append(value)
        inner = value.values() if isinstance(value, dict) else value
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    elif hasattr(value, "__slots__"):
        inner = [getattr(value, name) for name in value.__slots__]
    else:
        return []
    return found + [one for each in inner if depth < 6 for one in _lists(each, depth + 1)]
