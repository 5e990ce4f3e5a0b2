"""Follows one engine's KV events over ZMQ.

    SUB     topic | 8-byte big-endian number | payload
    DEALER  sends ["", first number], gets ["", topic, number, payload] for each batch that the
            engine kept, then one with number −1 (older releases leave the topic out)

On a new connection, on a gap and when another engine answers, the batches that were missed are
asked for. What a replay cannot give is lost: the pod's blocks are dropped, and known in part from
then on. While there is no connection, or batches are asked for, nothing is known of the pod.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .feed import PodFeed
from .messages import MAX_MESSAGE_BYTES, EventBatch, MalformedBatch, decode_batch
from .sequence import BatchOrder, Position, continues, is_whole, judge, unbroken_count

QUEUE_BATCHES: Final = 20_000
"""Batches that wait in a socket; past that ZMQ drops them, which is a gap. vLLM keeps 10,000 for a
replay."""
REPLAY_SECONDS: Final = 5.0
"""Seconds without a further batch of a replay after which it has failed. vLLM looks for replay
requests every 0.1 s."""
RETRY_SECONDS: Final = 30.0
"""Seconds after a failed replay in which none is tried: the engine probably offers none."""
HEARTBEAT_SECONDS: Final = 5.0
"""Interval of ZMQ's heartbeats, which detect a connection that died without a word."""
_RECONNECT_MS: Final = 5000
"""Most milliseconds between attempts to connect."""
_END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
_SLICE: Final = 64
"""Messages that are applied before other tasks may run."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine publishes its events."""

    events: str
    """ZMQ endpoint of the PUB socket, such as `tcp://10.0.0.7:5557`."""
    replay: str
    """ZMQ endpoint of the ROUTER socket."""
    topic: str = ""
    """Prefix of the topics to receive."""


class Subscriber:
    """Feeds a `PodFeed` until it is cancelled."""

    def __init__(
        self,
        context: "zmq.asyncio.Context",
        address: EngineAddress,
        feed: PodFeed,
        count: Callable[[str], None],
    ) -> None:
        """`count` takes `gap`, and the result of each replay: `continued`, `restarted` (another
        engine, everything since its start), `incomplete`, `failed` (no answer)."""
        self._context, self._address, self._feed, self._count = context, address, feed, count
        self._replay_after = 0.0
        """Event loop time before which no replay is tried."""

    async def run(self) -> None:
        """Follow the events; ZMQ reconnects by itself."""
        with ExitStack() as stack:
            subscription = self._socket(stack, zmq.SUB)
            subscription.subscribe(self._address.topic.encode())
            # Opened before connecting, so that it reports the first connection too.
            monitor = subscription.get_monitor_socket(
                zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
            )
            stack.callback(monitor.close, 0)
            # Before the close above: ZMQ's thread holds a lock while it reports an event, without
            # end if nobody can receive it, and this call takes the same lock.
            stack.callback(subscription.disable_monitor)
            subscription.connect(self._address.events)
            poller = zmq.asyncio.Poller()
            poller.register(monitor, zmq.POLLIN)
            poller.register(subscription, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll())
                if monitor in ready:
                    await self._follow_connection(monitor)
                if subscription in ready:
                    await self._receive(subscription)

    async def _follow_connection(self, monitor: "zmq.asyncio.Socket") -> None:
        message: Any = parse_monitor_message(await monitor.recv_multipart())
        self._feed.is_current = False
        if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
            # Batches were sent before the connection; perhaps by another engine.
            await self._catch_up()
            self._feed.is_current = True

    async def _receive(self, subscription: "zmq.asyncio.Socket") -> None:
        """Apply the messages that wait, a slice at most."""
        for _ in range(_SLICE):
            try:
                frames = await subscription.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._message(frames)

    async def _message(self, frames: list[bytes]) -> None:
        try:
            number, batch = _read(frames[1:])
        except MalformedBatch as err:
            self._lose(f"a malformed batch: {err}")
            return
        match judge(self._feed.position, number, batch.timestamp):
            case BatchOrder.NEXT:
                self._feed.apply(number, batch)
            case BatchOrder.DUPLICATE:
                pass
            case BatchOrder.GAP | BatchOrder.RESTART as verdict:
                if verdict is BatchOrder.GAP:
                    self._count("gap")
                # Until it has caught up, the index may have too much and too little.
                self._feed.is_current = False
                await self._catch_up()
                # A replay has this batch too, unless it failed.
                if judge(self._feed.position, number, batch.timestamp) is not BatchOrder.DUPLICATE:
                    self._feed.drop()
                    self._feed.apply(number, batch)
                self._feed.is_current = True

    async def _catch_up(self) -> None:
        """Replay what was missed since the last batch, or since the engine's start. If that fails,
        what the engine holds is not known any more."""
        if asyncio.get_running_loop().time() < self._replay_after:
            self._lose("missed batches cannot be replayed")
            return
        last = self._feed.position
        try:
            if last.number >= 0:
                batches = await self._replay(last.number)
                if continues(last, _positions(batches)):
                    self._count("continued")
                    await self._apply_all(batches[1:])
                    return
            batches = await self._replay(0)
        except (TimeoutError, MalformedBatch) as err:
            self._replay_after = asyncio.get_running_loop().time() + RETRY_SECONDS
            self._count("failed")
            self._lose(f"no replay from {self._address.replay}: {str(err) or 'no answer'}")
            return
        whole = is_whole(_positions(batches))
        # Without any batch the engine has just started, or has not computed anything yet.
        self._feed.drop(is_empty=whole)
        self._count("restarted" if whole else "incomplete")
        await self._apply_all(batches)

    async def _replay(self, first: int) -> list[tuple[int, EventBatch]]:
        """The batches from number `first` on that the engine kept. Raises TimeoutError,
        MalformedBatch."""
        batches: list[tuple[int, EventBatch]] = []
        with ExitStack() as stack:
            dealer = self._socket(stack, zmq.DEALER)
            dealer.connect(self._address.replay)
            while len(batches) < QUEUE_BATCHES:
                part = await _ask(dealer, first)
                unbroken = unbroken_count(_positions(part))
                batches += part[:unbroken]
                if unbroken == len(part):
                    return batches
                # The engine's socket dropped what its queue did not hold: ask for the rest.
                first = part[unbroken - 1][0] + 1
        raise MalformedBatch(f"a replay of more than {QUEUE_BATCHES} batches")

    async def _apply_all(self, batches: list[tuple[int, EventBatch]]) -> None:
        for number, batch in batches:
            self._feed.apply(number, batch)
            # Thousands of batches: requests are placed between them.
            await asyncio.sleep(0)

    def _lose(self, why: str) -> None:
        _log.warning("the KV index of %s starts anew: %s", self._address.events, why)
        self._feed.drop()

    def _socket(self, stack: ExitStack, kind: int) -> "zmq.asyncio.Socket":
        socket = self._context.socket(kind)
        stack.callback(socket.close, 0)
        socket.rcvhwm = QUEUE_BATCHES
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.ipv6 = "[" in self._address.events
        # Pods that publish nothing are tried less and less often.
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, _RECONNECT_MS
        socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1000)
        socket.heartbeat_timeout = int(3 * HEARTBEAT_SECONDS * 1000)
        socket.linger = 0
        return socket


async def _ask(dealer: "zmq.asyncio.Socket", first: int) -> list[tuple[int, EventBatch]]:
    """One request for a replay. Raises TimeoutError, MalformedBatch."""
    await dealer.send_multipart((b"", first.to_bytes(8, "big")))
    batches: list[tuple[int, EventBatch]] = []
    while True:
        async with asyncio.timeout(REPLAY_SECONDS):
            frames = await dealer.recv_multipart()
        if len(frames) >= 2 and frames[-2] == _END:
            return batches
        batches.append(_read(frames[-2:]))


def _read(frames: list[bytes]) -> tuple[int, EventBatch]:
    """Number and batch of the last two frames of a message. Raises MalformedBatch."""
    if len(frames) != 2 or len(frames[0]) != 8:
        raise MalformedBatch("not the frames of a batch")
    return int.from_bytes(frames[0], "big"), decode_batch(frames[1])


def _positions(batches: list[tuple[int, EventBatch]]) -> list[Position]:
    return [Position(number, batch.timestamp) for number, batch in batches]
