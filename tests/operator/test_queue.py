from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_operator.runtime.queue import MAX_DELAY, Queue, QueueClosed, backoff


@dataclass
class Timer:
    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def when(self) -> float:
        return self.at


@dataclass
class Clock:
    """A clock that the test advances."""

    now: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def schedule(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now + seconds, call))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [pending for pending in self.timers if pending.at <= self.now]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.call()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Queue[str]:
    return Queue(clock.schedule, jitter=lambda: 1.0)


async def test_a_key_added_repeatedly_is_delivered_once_and_in_order(queue: Queue[str]) -> None:
    for key in "abaab":
        queue.add(key)
    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]


async def test_a_key_added_while_active_is_delivered_again_after_done(
    queue: Queue[str],
) -> None:
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    queue.add("b")
    assert await queue.get() == "b"
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    queue.done("b")
    assert len(queue) == 0


async def test_the_earlier_of_two_timers_counts(queue: Queue[str], clock: Clock) -> None:
    queue.add_after("a", 10.0)
    queue.add_after("a", 2.0)
    queue.add_after("a", 5.0)
    clock.advance(2.0)
    assert await queue.get() == "a"
    queue.done("a")
    clock.advance(20.0)
    assert len(queue) == 0


async def test_a_failing_key_backs_off_and_delays_no_other(queue: Queue[str], clock: Clock) -> None:
    waits = []
    for _ in range(9):
        queue.add("bad")
        assert await queue.get() == "bad"
        waits.append(queue.retry("bad"))
        queue.done("bad")
        queue.add("good")
        assert await queue.get() == "good"
        queue.done("good")
        clock.advance(waits[-1])
        assert await queue.get() == "bad"
        queue.done("bad")
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


async def test_success_resets_backoff_and_at_least_extends_it(
    queue: Queue[str],
) -> None:
    assert queue.retry("a") < queue.retry("a")
    queue.forget("a")
    assert queue.retry("a") == 0.5
    assert queue.retry("a", at_least=30.0) == 30.0


async def test_a_closed_queue_ends_its_workers_and_accepts_nothing(
    queue: Queue[str], clock: Clock
) -> None:
    queue.add("a")
    assert await queue.get() == "a"
    queue.add_after("a", 1.0)
    queue.add("b")
    queue.close()
    queue.add("c")
    queue.add_after("c", 1.0)
    queue.done("a")
    clock.advance(5.0)
    with pytest.raises(QueueClosed):
        await queue.get()


@given(st.integers(1, 60), st.floats(0, 1))
def test_backoff_grows_within_its_bounds(failures: int, dice: float) -> None:
    assert 0.25 <= backoff(failures, dice) <= MAX_DELAY
    assert backoff(failures, dice) <= backoff(failures + 1, dice)
