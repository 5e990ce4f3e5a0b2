"""Tasks that must not end: an error that ends one is logged, and the task is started again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

RESTART_SECONDS: Final = 1.0
"""Seconds from an error to the next start. Too low: an error that recurs fills the log."""
_log: Final = logging.getLogger(__name__)


class SupervisedTask:
    """Runs a coroutine until it returns or `cancel` is called. An exception is a bug: its traceback
    is logged, and the coroutine is started again after a pause."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Coroutine[Any, Any, None]],
        on_error: Callable[[], None] = lambda: None,
        pause: float = RESTART_SECONDS,
    ) -> None:
        """`name` says in the log what ended; `start` makes the coroutine; `on_error` is called
        before it starts again, to give up what the coroutine keeps current. `pause` is in
        seconds."""
        self._name, self._start, self._on_error, self._pause = name, start, on_error, pause
        self._restart: asyncio.TimerHandle | None = None
        self._is_cancelled = False
        self._task = self._begin()

    def cancel(self) -> None:
        """End the coroutine for good."""
        self._is_cancelled = True
        self._task.cancel()
        if self._restart is not None:
            self._restart.cancel()

    async def wait(self) -> None:
        """Wait until the coroutine has ended; after `cancel`."""
        await asyncio.wait([self._task])

    def _begin(self) -> asyncio.Task[None]:
        self._restart = None
        self._task = asyncio.create_task(self._start())
        self._task.add_done_callback(self._on_done)
        return self._task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("%s ended by an unexpected error", self._name, exc_info=error)
        if not self._is_cancelled:
            self._on_error()
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(self._pause, self._begin)


async def run_until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run `parts` together. When one of them ends the others are cancelled, and its error is
    raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
