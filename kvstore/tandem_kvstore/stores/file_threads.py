"""Threads for reading and writing files.

The event loop's own threads do not do this work: a call on a file system that hangs keeps its
thread, and the loop's threads also tokenize prompts, look up host names and copy KV to the device.
They are daemon threads: such a call does not keep the process from ending.
"""

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """At most `most` daemon threads, started when they are needed. Any thread may call `submit`."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._forget_threads()
        # A child process has none of the threads.
        os.register_at_fork(after_in_child=self._forget_threads)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `fn` in a thread."""
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        with self._lock:
            if not self._idle.acquire(blocking=False) and self._started < self._most:
                self._started += 1
                Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _forget_threads(self) -> None:
        self._started = 0
        self._idle, self._lock = Semaphore(0), Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as err:  # noqa: BLE001 - it belongs to the caller
                    future.set_exception(err)
            # Not kept until the next call: they may have the bytes of an object.
            del future, call
            self._idle.release()


FILE_THREADS: Final = DaemonThreads(32, "kv-files")
"""Of all directories that this process uses. Fewer: slower on network file systems. More: more
memory for stacks."""
