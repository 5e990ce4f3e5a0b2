import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem_engine.transfer.threads import run_on_socket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def one_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "kv-test") as executor:
        yield executor


async def test_results_and_errors_come_back(
    pair: tuple[socket.socket, socket.socket], one_thread: ThreadPoolExecutor
) -> None:
    assert await run_on_socket(one_thread, pair[0], lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await run_on_socket(one_thread, pair[0], lambda: 1 // 0)


async def test_cancelled_work_has_ended_when_the_cancellation_goes_on(
    pair: tuple[socket.socket, socket.socket], one_thread: ThreadPoolExecutor
) -> None:
    started, unblocked, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        assert pair[0].recv(1) == b""
        unblocked.wait()
        ended.set()

    task = asyncio.create_task(run_on_socket(one_thread, pair[0], work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    unblocked.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_work_cancelled_in_the_queue_never_runs(
    pair: tuple[socket.socket, socket.socket], one_thread: ThreadPoolExecutor
) -> None:
    busy, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(run_on_socket(one_thread, pair[0], busy.wait))
    second = asyncio.create_task(run_on_socket(one_thread, pair[1], ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    busy.set()
    assert await first
    assert not ran.is_set()
    assert pair[1].send(b"x") == 1, "the socket of work that never ran is left alone"
