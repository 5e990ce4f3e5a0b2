"""A process whose engines end just when their subscribers do; it says so when it got through."""

import asyncio
from collections import Counter
from functools import partial

import zmq
import zmq.asyncio

from tandem_epp.prefix.kv_events.feed import PodFeed
from tandem_epp.prefix.kv_events.subscriber import Subscriber
from tandem_epp.prefix.pod_blocks import PodBlocks
from tests.epp.real import until

from .fake_publisher import FakeVllmPublisher

ROUNDS = 300
"""Enough for the fault to occur in every run."""


async def main() -> None:
    context = zmq.asyncio.Context()
    for _ in range(ROUNDS):
        async with FakeVllmPublisher() as engine:
            feed = PodFeed("pod", PodBlocks(), Counter())
            subscriber = Subscriber(context, engine.address, feed, lambda _: None)
            task = asyncio.create_task(subscriber.run())
            await until(partial(_connected, feed))
            engine.hang_up()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    context.destroy(linger=0)
    print("every subscriber ended")


async def _connected(feed: PodFeed) -> bool:
    return feed.is_current


asyncio.run(main())
