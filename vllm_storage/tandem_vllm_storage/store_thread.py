"""A thread with the event loop for `tandem_kvstore`, because vLLM's loops are synchronous."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from threading import Thread
from typing import Any, Final, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")

STOP_SECONDS: Final = 10.0
"""Seconds that a stopping engine waits for its writes."""


class StoreThread:
    """An event loop in a daemon thread: a store that stalls does not keep the engine running."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="kv-storage", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work`; safe from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function` on the event loop, where `tandem_kvstore` expects to be called."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and wait for its result."""
        return self.submit(work).result()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last` for at most STOP_SECONDS, then end the thread."""
        try:
            self.submit(last).result(STOP_SECONDS)
        except FutureTimeoutError:
            _log.warning("KV that waited to be written was given up after %.0f s", STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()
