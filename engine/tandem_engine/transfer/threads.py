"""Blocking work on a socket in a worker thread, which ends when its task is cancelled."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def run_on_socket(executor: Executor, sock: socket.socket, work: Callable[[], _T]) -> _T:
    """What `work` returns or raises.

    On cancellation the socket is shut down, which ends a blocking call on it at once, and the
    cancellation goes on only when the thread has left `work`.
    """
    submitted = executor.submit(work)
    running = asyncio.wrap_future(submitted)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not submitted.cancel():
            shut_down(sock)
            await _ended(running)
        raise


def shut_down(sock: socket.socket) -> None:
    """End both directions, as a peer that goes away does; harmless on an ended socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


async def _ended(running: "asyncio.Future[_T]") -> None:
    """Wait for the thread, whatever else is cancelled meanwhile; its outcome no longer matters."""
    while not running.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])
    if not running.cancelled():
        running.exception()
