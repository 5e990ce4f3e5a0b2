"""A time limit that an event loop which stands still does not use up.

    async with Deadline(seconds):
        ...                          TimeoutError, as of `asyncio.timeout`

On a busy machine a process may not run for seconds. Timers then run before what the sockets have is
processed, so that an answer which came in time would count as late, and the peer as dead.
"""

import asyncio
from types import TracebackType
from typing import Final

_STEPS: Final = 8
"""Parts of the time, each of which counts once however late the loop notices that it has passed."""
_TURN: Final = 0.001
"""Seconds in which the event loop looks at its sockets at least once."""
_TURNS: Final = 5
"""Such turns after all steps: what the system has, a connection for example, takes as many to reach
the task that waits."""


class Deadline:
    """Cancels its block after so many seconds in which the loop ran, and raises TimeoutError."""

    def __init__(self, seconds: float | None) -> None:
        """None: there is no limit."""
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        if self._seconds is not None:
            self._wait(self._seconds / _STEPS, _STEPS)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _wait(self, step: float, left: int) -> None:
        """Wait for `left` times `step`, then for some turns, and end the block."""
        loop = asyncio.get_running_loop()
        if left > 0:
            self._timer = loop.call_later(step, self._wait, step, left - 1)
        elif left > -_TURNS:
            self._timer = loop.call_later(_TURN, self._wait, step, left - 1)
        else:
            self._timeout.reschedule(loop.time())
