"""KV cache events over ZMQ in vLLM's wire format, with replay.

    PUB     topic | 8-byte big-endian sequence | msgpack [ts, [event, …], data-parallel rank]
    ROUTER  a DEALER asks ["", first sequence] and gets ["", topic, sequence, payload] for each
            batch in its buffer, then ["", "", sequence −1, ""]

An event is a map tagged `type`. Events of one event loop iteration are sent as one batch. Without
subscribers PUB drops them; it never blocks.

Errors: `EventsUnusable`: the configuration is wrong, or an endpoint cannot be opened.
"""

import asyncio
import ipaddress
import time
from collections import deque
from contextlib import suppress
from typing import Final, Literal

import msgspec
import zmq
import zmq.asyncio

from tandem_contract import ports

from .blocks import GPU, AllBlocksCleared, BlockEvent, BlocksRemoved, BlocksStored
from .types import EngineError

_END: Final = (-1).to_bytes(8, "big", signed=True)
_MOST: Final = 2**31 - 1
"""ZMQ's high-water marks are C ints."""


class EventsUnusable(EngineError):
    """KV events cannot be published; the message has the setting or endpoint, and the reason."""


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None is zmq when events are enabled."""
    endpoint: str = f"tcp://*:{ports.KV_EVENTS}"
    """Bound when it holds `*` or `::` or is no tcp endpoint; else connected to, as by vLLM. `*` is
    the address the engine itself listens at, where `--host` names one."""
    replay_endpoint: str | None = None
    """None: no replay; a subscriber that misses a batch must drop its whole index."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches a slow subscriber may lag behind before it loses some."""
    max_queue_size: int = 100_000
    """vLLM's thread queue, which this engine does not need."""
    topic: str = ""

    @property
    def is_active(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events_config(text: str) -> KvEventsConfig:
    """The flag's JSON. Raises EventsUnusable."""
    try:
        config = msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.MsgspecError, UnicodeEncodeError) as err:
        raise EventsUnusable(f"--kv-events-config: {err}") from err
    for name in ("buffer_steps", "hwm"):
        if not 1 <= getattr(config, name) <= _MOST:
            raise EventsUnusable(f"--kv-events-config: {name} must be 1 to {_MOST}")
    return config


class BlockStored(msgspec.Struct, tag=True):
    """Wire form of `BlocksStored`. No adapters here: those fields are null."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = GPU
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...] | None, ...] | None = None
    """What each block's hash depends on beside the tokens: the cache_salt, in a prompt's first."""


class BlockRemoved(msgspec.Struct, tag=True):
    """Wire form of `BlocksRemoved`."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = GPU


class AllCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """Wire form of `AllBlocksCleared`."""


WireEvent = BlockStored | BlockRemoved | AllCleared


def wire_event(event: BlockEvent) -> WireEvent:
    """The wire form of `event`."""
    match event:
        case BlocksStored(hashes, parent_hash, token_ids, block_size, medium, salt):
            keys = ((salt,), *(None for _ in hashes[1:])) if salt else None
            return BlockStored(
                hashes, parent_hash, token_ids, block_size, medium=medium, extra_keys=keys
            )
        case BlocksRemoved(hashes, medium):
            return BlockRemoved(hashes, medium)
        case AllBlocksCleared():
            return AllCleared()


class KvEventPublisher:
    """Publishes on the event loop it was started on.

    publisher = KvEventPublisher(config)
    publisher.start()
    publisher.publish(event)
    await publisher.stop()
    """

    def __init__(self, config: KvEventsConfig, *, host: str = "", rank: int = 0) -> None:
        """`host` is the address that the engine listens on."""
        self._config = config
        self._host = host
        self._rank = rank
        self._topic = config.topic.encode()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._replay_buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._pending: list[WireEvent] = []
        self._encoder = msgspec.msgpack.Encoder()

    def start(self) -> None:
        """Open the endpoints. Raises EventsUnusable, with nothing left open."""
        self._pub.set_hwm(self._config.hwm)
        # A stop must not wait for subscribers that have gone.
        self._pub.linger = 0
        try:
            _open(self._pub, self._config.endpoint, self._host)
            if self._config.replay_endpoint is not None:
                self._replay = zmq.asyncio.Socket(self._context, zmq.ROUTER)
                # A whole buffer goes out at once; the buffer's own size bounds it.
                self._replay.sndhwm = 0
                self._replay.linger = 0
                _open(self._replay, self._config.replay_endpoint, self._host)
        except EventsUnusable:
            self._close()
            raise
        if self._replay is not None:
            self._replaying = asyncio.create_task(self._serve_replay(self._replay))

    @property
    def endpoint(self) -> str:
        """Endpoint that subscribers connect to, with the port that was bound."""
        return _address(self._pub)

    @property
    def replay_endpoint(self) -> str | None:
        """Endpoint for replay; None without replay."""
        return None if self._replay is None else _address(self._replay)

    def publish(self, event: BlockEvent) -> None:
        """Send `event` in one batch with all others of this event loop iteration."""
        if not self._pending:
            # Runs after the current callback: a scheduled step emits all its events before that.
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(wire_event(event))

    async def stop(self) -> None:
        """Send the pending events and close the endpoints."""
        # Before the sockets close: the events of this iteration are still pending.
        self._flush()
        if self._replaying is not None:
            self._replaying.cancel()
            with suppress(asyncio.CancelledError):
                await self._replaying
        self._close()

    def _flush(self) -> None:
        if not self._pending or self._pub.closed:
            return
        payload = self._encoder.encode((time.time(), self._pending, self._rank))
        self._pending = []
        sequence = self._sequence.to_bytes(8, "big")
        # Subscribers detect a lost batch by a gap in these numbers.
        self._sequence += 1
        # Before sending: a subscriber that misses this batch can ask for it at once.
        self._replay_buffer.append((sequence, payload))
        # PUB drops at its high-water mark, so NOBLOCK never fails here.
        self._pub.send_multipart((self._topic, sequence, payload), zmq.NOBLOCK)

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            # Ignored rather than answered: the socket must stay usable for other subscribers.
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _, first = frames
            # A copy: sends yield to the event loop, which may append batches meanwhile.
            for sequence, payload in list(self._replay_buffer):
                if sequence >= first:
                    await router.send_multipart((client, b"", self._topic, sequence, payload))
            await router.send_multipart((client, b"", b"", _END, b""))

    def _close(self) -> None:
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        # Last: it blocks until every socket of the context is closed.
        self._context.term()


def _open(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, host: str) -> None:
    bind = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    # On one machine several engines bind the same port, each at its own address.
    if bind and _is_one_address(host):
        own = f"[{host}]" if ":" in host else host
        endpoint = endpoint.replace("tcp://*:", f"tcp://{own}:")
    # ZMQ refuses IPv6 addresses otherwise.
    socket.ipv6 = ":" in host or "[" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as err:
        raise EventsUnusable(f"KV events endpoint {endpoint}: {err.strerror}") from err


def _is_one_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _address(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> str:
    return socket.get_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "127.0.0.1")
