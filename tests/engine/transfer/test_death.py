"""Either side's process is killed in the middle of a hand-off."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem_engine.transfer.producer import FreeReason, Producer
from tandem_engine.transfer.puller import Puller
from tandem_engine.types import KvBroken

from .support import DEADLINE, HOST, LAYOUT, Freed, finish, params, until

pytestmark = pytest.mark.component


@asynccontextmanager
async def dying(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A peer that waits in mid-hand-off; killed at the end at the latest."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{__package__}.dying_peer", *arguments,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await process.stdout.readline()).decode().strip()


async def test_the_producers_death_breaks_the_pull(puller: Puller) -> None:
    async with dying("producer") as process:
        address = (HOST, int(await line(process)))
        pull = asyncio.create_task(puller.pull(params(address), [3, 4], 0, 8))
        assert await line(process) == "reading"
        process.kill()
        with pytest.raises(KvBroken):
            await pull
    with pytest.raises(KvBroken):
        await puller.pull(params(address), [3, 4], 0, 8)


async def test_the_readers_death_leaves_the_blocks_for_a_retry(
    producer: Producer, puller: Puller, freed: Freed
) -> None:
    finish(producer, "r", [1, 2], LAYOUT)
    async with dying("reader", *map(str, producer.address)) as process:
        assert await line(process) == "reading"
        assert producer.has_reader("r")
        process.kill()
        await until(lambda: not producer.has_reader("r"))
    assert (freed.log, producer.hold_count) == ([], 1)
    await puller.pull(params(producer.address), [3, 4], 0, 8)
    assert freed.log == [("r", FreeReason.READ)]
