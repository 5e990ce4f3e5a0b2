"""Runs blocking socket work in a worker thread that ends when its task is cancelled."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def run_on_socket(executor: Executor, sock: socket.socket, work: Callable[[], _T]) -> _T:
    """Run `work` in a thread of `executor`; returns or raises what it does.

    On cancellation the socket is shut down, which ends a blocking call on it at once. The
    cancellation is passed on only when the thread has left `work`, so that the caller may then
    close the socket and free the memory that `work` used.
    """
    submitted = executor.submit(work)
    running = asyncio.wrap_future(submitted)
    try:
        # A cancelled future would not stop the thread, which still uses the caller's memory.
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # The thread has started: only the end of its socket makes it return soon.
        if not submitted.cancel():
            shut_down(sock)
            await _wait_for_end(running)
        raise


def shut_down(sock: socket.socket) -> None:
    """Shut down both directions of a socket; no effect on one that is shut down or closed."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _wait_for_end(running: "asyncio.Future[_T]") -> None:
    """Wait for the thread even when cancelled again; its result or error is dropped."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        # Mark the error as retrieved; asyncio would log it otherwise.
        running.exception()
