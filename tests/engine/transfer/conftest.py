"""Every test here must end with no socket, thread or task left over."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator

import pytest

from tandem_engine.transfer.producer import Producer
from tandem_engine.transfer.puller import Puller

from .support import ENGINE, HOST, LAYOUT, Freed, cache, until


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def _transfer_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("kv-send", "kv-pull"))]


@pytest.fixture(autouse=True)
async def nothing_left_over() -> AsyncIterator[None]:
    tasks, files = len(asyncio.all_tasks()), _open_files()
    yield
    await until(lambda: len(asyncio.all_tasks()) <= tasks and _open_files() <= files)
    assert _transfer_threads() == []


@pytest.fixture
def freed() -> Freed:
    return Freed()


@pytest.fixture
async def producer(freed: Freed) -> AsyncIterator[Producer]:
    """A cache of seed 1 under a lease longer than any test."""
    new_producer = Producer(cache(1), LAYOUT, ENGINE, HOST, 0, 60.0, freed)
    await new_producer.start()
    yield new_producer
    await new_producer.close()


@pytest.fixture
async def puller() -> AsyncIterator[Puller]:
    """A cache of zeros."""
    new_puller = Puller([layer.zero_() for layer in cache(2)], LAYOUT)
    yield new_puller
    await new_puller.close()
