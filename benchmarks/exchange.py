"""Time until a placement is known to the other replicas of an EPP.

Three channels over real sockets, in one process and on one event loop, so a replica's work also
delays the others: an upper bound. Each replica publishes RATE placements per second with the prefix
chain of a prompt of 3,200 tokens, an answer and an end for each. Measured: the seconds from
`publish` to `apply` of each placement at each other replica.
"""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from random import Random
from statistics import quantiles
from time import monotonic
from typing import Final

import click
import uvloop
from prometheus_client import CollectorRegistry

from tandem_contract.commandline import HostPort
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.replicas.peers.channel import PeerChannel, PeerSettings
from tandem_epp.replicas.peers.frames import (
    Event,
    RequestAnswered,
    RequestEnded,
    RequestStarted,
    pack,
)
from tandem_epp.replicas.peers.metrics import PeerMetrics
from tandem_epp.replicas.shared_fleet import encode_response
from tandem_local.ports import free_port

from .figures import Figure, at_most, report

REPLICAS: Final = 3
RATE: Final = 100
"""Placements per second and replica."""
SECONDS: Final = 10.0
BLOCKS: Final = 200
"""Hashes in a chain: 3,200 tokens in blocks of 16."""

ANSWER: Final = encode_response(ResponseHeaders(None))


class Receiver:
    """Notes how long each placement took."""

    def __init__(self, sent: dict[int, float]) -> None:
        self.delays: list[float] = []
        self._sent = sent

    def snapshot(self) -> list[Event]:
        """Nothing: measuring starts when all are connected."""
        return []

    def lacks_snapshot(self, peer: str) -> bool:
        """Never."""
        return False

    def reset(self, peer: str) -> None:
        """Nothing is kept."""

    def apply(self, peer: str, event: Event) -> None:
        """Measure a placement."""
        if isinstance(event, RequestStarted):
            self.delays.append(monotonic() - self._sent[event.request])


async def measure() -> list[float]:
    """Run the replicas; the seconds of every placement at every other replica."""
    addresses = [HostPort("127.0.0.1", free_port("127.0.0.1")) for _ in range(REPLICAS)]
    sent: dict[int, float] = {}
    receivers = [Receiver(sent) for _ in addresses]
    async with AsyncExitStack() as stack:
        channels = []
        for address, receiver in zip(addresses, receivers, strict=True):
            settings = PeerSettings(peers=tuple(addresses), listen=address)
            channel = PeerChannel(settings, receiver, PeerMetrics(CollectorRegistry()))
            channel.use_keys({"k": b"0123456789abcdef"})
            await stack.enter_async_context(channel.running())
            channel.open()
            channels.append(channel)
        await _until(lambda: all(len(each.connected) == REPLICAS - 1 for each in channels))
        numbers = count()
        await asyncio.gather(*(_place(channel, numbers, sent) for channel in channels))
        expected = (REPLICAS - 1) * len(sent)
        await _until(lambda: sum(len(each.delays) for each in receivers) == expected)
    return [delay for receiver in receivers for delay in receiver.delays]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a channel has no event for it
            await asyncio.sleep(0.05)


async def _place(channel: PeerChannel, numbers: "count[int]", sent: dict[int, float]) -> None:
    random = Random(id(channel))
    end = monotonic() + SECONDS
    while monotonic() < end:
        number = next(numbers)
        chain = pack(array("Q", (random.getrandbits(64) for _ in range(BLOCKS))))
        sent[number] = monotonic()
        channel.publish(RequestStarted(number, "decode-1", ("prefill-1",), chain=chain))
        channel.publish(RequestAnswered(number, ANSWER))
        channel.publish(RequestEnded(number))
        await asyncio.sleep(random.expovariate(RATE))


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(file: Path | None) -> None:
    """Measure how fast replicas of an EPP know each other's placements."""
    delays = uvloop.run(measure())
    percentiles = quantiles(delays, n=100)
    figures: list[Figure] = [
        at_most("placement known to another replica, median", percentiles[49] * 1e3, "ms", 100),
        at_most("placement known to another replica, p99", percentiles[98] * 1e3, "ms", 100),
        at_most("placement known to another replica, max", max(delays) * 1e3, "ms", 100),
    ]
    report(figures, file)


if __name__ == "__main__":
    main()
