"""Tasks that are started again, and tasks that end together."""

import asyncio
import logging

import pytest

from tandem_epp.supervised import SupervisedTask, run_until_one_ends


async def test_an_error_is_logged_and_the_task_starts_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts: list[int] = []
    errors: list[int] = []
    is_running = asyncio.Event()

    async def work() -> None:
        starts.append(len(starts))
        if len(starts) < 3:
            raise ArithmeticError("a bug")
        is_running.set()
        await asyncio.Event().wait()

    task = SupervisedTask("the work", work, lambda: errors.append(len(starts)), pause=0.0)
    await is_running.wait()
    assert (starts, errors) == ([0, 1, 2], [1, 2])
    records = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert [r.getMessage() for r in records] == ["the work ended by an unexpected error"] * 2
    assert all(record.exc_info is not None for record in records)
    task.cancel()
    await task.wait()
    assert len(starts) == 3


async def test_a_task_that_returns_or_is_cancelled_is_not_started_again() -> None:
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1

    task = SupervisedTask("the work", work, pause=0.0)
    await task.wait()
    cancelled = SupervisedTask("the work", asyncio.Event().wait, pause=0.0)  # type: ignore[arg-type]
    cancelled.cancel()
    await cancelled.wait()
    assert starts == 1


async def test_the_first_to_end_ends_the_others() -> None:
    is_cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def failing() -> None:
        raise ArithmeticError("a bug")

    with pytest.raises(ArithmeticError):
        await run_until_one_ends(endless(), failing())
    assert is_cancelled.is_set()
