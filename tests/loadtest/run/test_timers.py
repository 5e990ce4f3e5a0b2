import asyncio
from time import monotonic

import pytest

from tandem_loadtest.run.timers import Timers


async def test_calls_are_made_in_the_order_of_their_times_and_never_early() -> None:
    calls: list[tuple[int, bool]] = []
    done = asyncio.Event()
    with Timers() as timers:
        start = monotonic()

        def call(number: int, when: float) -> None:
            calls.append((number, monotonic() >= when))
            if number == 3:
                done.set()

        for number in (2, 0, 3, 1):
            when = start + 0.004 * number
            timers.call_at(when, lambda number=number, when=when: call(number, when))  # type: ignore[misc]
        await done.wait()
    assert calls == [(0, True), (1, True), (2, True), (3, True)]


async def test_a_call_whose_time_is_over_is_made_by_the_loop_not_at_once() -> None:
    called = asyncio.Event()
    with Timers() as timers:
        timers.call_at(monotonic() - 1.0, called.set)
        assert not called.is_set()
        await called.wait()


async def test_a_call_may_add_another() -> None:
    called = asyncio.Event()
    with Timers() as timers:
        timers.call_at(0.0, lambda: timers.call_at(0.0, called.set))
        await called.wait()


async def test_a_cancelled_sleeper_does_not_disturb_the_others() -> None:
    with Timers() as timers:
        when = timers.now() + 0.01
        cancelled, other = (asyncio.create_task(timers.sleep_until(when)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await other
        with pytest.raises(asyncio.CancelledError):
            await cancelled


async def test_calls_are_forgotten_at_the_end() -> None:
    called = asyncio.Event()
    with Timers() as timers:
        timers.call_at(timers.now() + 0.001, called.set)
    with Timers() as timers:
        await timers.sleep_until(timers.now() + 0.002)
    assert not called.is_set()
