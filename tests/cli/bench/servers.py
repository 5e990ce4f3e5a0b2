"""Servers for `tandem bench`, in another thread: the command runs an event loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager

from tests.loadtest.run.engines import FakeOpenAI


def wait_for_requests(server: FakeOpenAI, loop: asyncio.AbstractEventLoop, count: int) -> None:
    """Wait in this thread until `server`, which serves on `loop`, has got `count` requests."""
    asyncio.run_coroutine_threadsafe(server.holds(count), loop).result(30)


def background(
    server: FakeOpenAI, loop: asyncio.AbstractEventLoop | None = None
) -> AbstractContextManager[str]:
    """The URL of `server` in a thread that runs `loop`, or a new one."""
    return in_thread(server.serve(), loop or asyncio.new_event_loop())


@contextmanager
def in_thread(
    serving: AbstractAsyncContextManager[str], loop: asyncio.AbstractEventLoop
) -> Iterator[str]:
    """The URL of what serves in a thread that runs `loop`."""
    up, urls, stop = threading.Event(), list[str](), asyncio.Event()

    async def run() -> None:
        async with serving as url:
            urls.append(url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert up.wait(10)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
