"""Drivers that send many calls: at given times, or a conversation turn by turn.

results = await run_open_loop(client.send, [Timed(0.0, call), Timed(0.25, other)])
results = await converse(client.send, script)
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from .calls import Call, Result
from .records import Outcome
from .workload.conversations import Script

Send = Callable[[Call], Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class Timed:
    """A call and the time to send it, in seconds after the start."""

    at: float
    call: Call


async def run_open_loop(
    send: Send,
    calls: Sequence[Timed],
    *,
    max_in_flight: int = 1000,
    on_result: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Send every call at its time, without waiting for answers; results in the order of `calls`.

    A call whose time comes while `max_in_flight` answers are awaited is not sent later, as that
    would hide the overload: its result is a failure. Cancelling the run closes all its
    connections.
    """
    # A result for each call from the start: cancelled and unsent calls have one, too.
    results = [Result(timed.call, error="not sent", outcome=Outcome.UNSENT) for timed in calls]
    clock = asyncio.get_running_loop().time
    in_flight = 0

    async def send_call(index: int) -> None:
        nonlocal in_flight
        results[index] = await send(calls[index].call)
        in_flight -= 1
        on_result(results[index])

    start = clock()
    async with asyncio.TaskGroup() as group:
        # Traces are in order of arrival, other callers' lists need not be.
        for index in sorted(range(len(calls)), key=lambda i: calls[i].at):
            # From the start, not from the call before: delays do not add up.
            await asyncio.sleep(max(0.0, start + calls[index].at - clock()))
            if in_flight >= max_in_flight:
                reason = f"not sent: {in_flight} requests were in flight already"
                results[index] = msgspec.structs.replace(results[index], error=reason)
                on_result(results[index])
            else:
                in_flight += 1
                # Not awaited: in an open loop, a slow answer never delays the next request.
                group.create_task(send_call(index))
    return results


async def converse(
    send: Send, script: Script, *, on_result: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Send a conversation's requests one after the other; a failed one ends it."""
    results: list[Result] = []
    for step in range(len(script.steps)):
        result = await send(script.call(step, [r.answer.text for r in results]))
        results.append(result)
        on_result(result)
        # The next question repeats all answers, of which one is missing now.
        if not result.ok:
            break
    return results
