"""The connection to one peer: authenticates, sends a snapshot and updates, and reconnects."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Final

import msgspec
from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, ClientWSTimeout

from tandem_contract.commandline import HostPort
from tandem_contract.peer_handshake import Challenge, PeerRejected, Session

from ...supervised import run_until_one_ends
from .frames import HANDSHAKE, PATH, decode_acknowledgement
from .messages import MAX_MESSAGE, PeerError, decode, receive, send
from .metrics import PeerMetrics, PeerState
from .outbox import Outbox

BATCH_SECONDS: Final = 0.001
"""Seconds for which events are collected before they are sent. Too low: a message per event; too
high: other replicas choose without knowing of a burst."""
HEARTBEAT_SECONDS: Final = 1.0
"""Seconds without an event after which an empty frame is sent."""
SILENCE_SECONDS: Final = 5.0
"""Seconds without an acknowledgement after which a connection counts as broken."""
CONNECT_SECONDS: Final = 5.0
"""Seconds for connecting and for each message of the handshake."""
FIRST_PAUSE: Final = 0.1
"""Seconds before the first retry, at most; doubles with each further one."""
MAX_PAUSE: Final = 2.0
"""Seconds between retries, at most: the return of a peer goes unnoticed for as long."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Local:
    """What all dialers of this replica share."""

    instance: str
    """Random id of this process."""
    keys: Callable[[], Mapping[str, bytes]]
    snapshot: Callable[[], Iterable[bytes]]
    """Encoded events of a snapshot."""
    metrics: PeerMetrics
    connected: dict[str, "Dialer"]
    """Peers that a dialer is connected to. A peer with two addresses gets one connection."""
    epochs: Iterator[int]
    """Ascending numbers; each connection takes the next."""


class _Redundant(PeerError):
    """The address is this replica's own, or another one of a peer that is connected: `peer`."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.peer = peer


class Dialer:
    """Keeps the replica at one address informed."""

    def __init__(self, address: HostPort, local: Local, random: Random) -> None:
        self.address = address
        self.state: PeerState | None = PeerState.CONNECTING
        """None when the address is this replica's own, or another one of a connected peer."""
        self.has_tried = False
        """Whether the first attempt has connected, or failed."""
        self._local, self._random = local, random
        self._is_expected = asyncio.Event()
        """Set when the peer may have come back."""
        self._session: Session | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._outbox: Outbox | None = None
        """None while not connected: the snapshot of the next connection has everything."""
        self._is_waiting = asyncio.Event()
        """Set while events wait."""
        self._since: float | None = None
        """When the oldest event that waits came, monotonic seconds."""
        self._unacknowledged: deque[tuple[int, int, float]] = deque()
        """Epoch, number and time of the oldest event, monotonic seconds, of frames sent."""
        self._last_refusal = ""
        self._same_as: str | None = None
        """Instance at this address, which another dialer is connected to, or this replica itself.
        It is not dialed again while that is so."""

    def put(self, event: bytes) -> None:
        """Send an encoded event soon; dropped while there is no connection."""
        if self._outbox is not None:
            self._outbox.put(event)
            self._since = self._since or monotonic()
            self._is_waiting.set()

    async def run(self, client: ClientSession) -> None:
        """Connect and reconnect until cancelled."""
        failures = 0
        while True:
            if self._local.keys() and not self._is_redundant:
                failures = 0 if await self._attempt(client) else failures + 1
                self.has_tried = True
            await self._pause(failures)

    def retry(self) -> None:
        """The peer is reachable again: cut the pause before the next attempt short."""
        self._is_expected.set()

    async def _pause(self, failures: int) -> None:
        longest = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(failures, 16))
        pause = self._random.uniform(0.5, 1.0) * longest
        shortest = min(pause, FIRST_PAUSE / 2)
        # Never skipped: two replicas that both fail would call each other without end.
        await asyncio.sleep(shortest)
        try:
            async with asyncio.timeout(pause - shortest):
                await self._is_expected.wait()
        except TimeoutError:
            pass
        self._is_expected.clear()

    def on_error(self) -> None:
        """`run` ended by an unexpected error."""
        self.state = PeerState.CONNECTING

    @property
    def _is_redundant(self) -> bool:
        return self._same_as == self._local.instance or self._same_as in self._local.connected

    async def close_revoked(self, revoked: Set[str]) -> None:
        """Close the connection if it uses one of the `revoked` keys."""
        if self._session is not None and self._socket is not None and self._session.key in revoked:
            await self._socket.close()

    async def _attempt(self, client: ClientSession) -> bool:
        """One connection, from its handshake to its end; returns whether it was made."""
        try:
            await self._connect(client)
        except _Redundant as err:
            self.state, self._same_as = None, err.peer
        except PeerRejected as err:
            self.state = PeerState.REFUSED
            self._local.metrics.refused.labels(err.reason).inc()
            # Once per reason: the address is tried again every two seconds.
            if str(err) != self._last_refusal:
                self._last_refusal = str(err)
                _log.warning("not connected to the EPP replica %s: %s", self.address, err)
        except (PeerError, ClientError, OSError, TimeoutError) as err:
            was_connected = self.state is PeerState.CONNECTED
            self.state = PeerState.CONNECTING
            if was_connected:
                _log.info("lost the connection to the EPP replica %s: %s", self.address, err)
            return was_connected
        return False

    async def _connect(self, client: ClientSession) -> None:
        """Raises PeerRejected, PeerError, ClientError, OSError or TimeoutError at its end."""
        url, timeout = f"http://{self.address}{PATH}", ClientWSTimeout(ws_close=1.0)
        async with asyncio.timeout(CONNECT_SECONDS):
            socket = await client.ws_connect(url, max_msg_size=MAX_MESSAGE, timeout=timeout)
        connected = self._local.connected
        try:
            session = await self._handshake(socket)
            if session.peer == self._local.instance or session.peer in connected:
                raise _Redundant(session.peer)
            connected[session.peer] = self
            self.has_tried = True
            try:
                await self._inform(socket, session)
            finally:
                del connected[session.peer]
                self._outbox = self._session = self._socket = None
        finally:
            await socket.close()

    async def _handshake(self, socket: ClientWebSocketResponse) -> Session:
        keys = self._local.keys()
        first = HANDSHAKE.hello(self._local.instance, keys)
        await send(socket, msgspec.msgpack.encode(first), CONNECT_SECONDS)
        answer = decode(await receive(socket, CONNECT_SECONDS), Challenge)
        proof, session = HANDSHAKE.prove(first, answer, keys)
        await send(socket, msgspec.msgpack.encode(proof), CONNECT_SECONDS)
        return session

    async def _inform(self, socket: ClientWebSocketResponse, session: Session) -> None:
        local = self._local
        outbox = Outbox(local.epochs, local.snapshot, local.metrics.dropped.inc)
        self._outbox, self._session, self._socket = outbox, session, socket
        self._unacknowledged.clear()
        self._since = None
        # The snapshot waits.
        self._is_waiting.set()
        await run_until_one_ends(self._write(socket, session, outbox), self._read(socket, session))

    async def _read(self, socket: ClientWebSocketResponse, session: Session) -> None:
        while True:
            sealed = await receive(socket, SILENCE_SECONDS)
            self._acknowledge(session.acknowledgements.open(sealed))
            # Not after the handshake: the listener may still refuse our proof.
            self.state, self._last_refusal = PeerState.CONNECTED, ""

    async def _write(
        self, socket: ClientWebSocketResponse, session: Session, outbox: Outbox
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._is_waiting.wait()
                await asyncio.sleep(BATCH_SECONDS)
            except TimeoutError:
                pass
            self._is_waiting.clear()
            since, self._since = self._since or monotonic(), None
            await self._send_frame(socket, session, outbox, since)
            while not outbox.is_empty:
                await self._send_frame(socket, session, outbox, since)

    async def _send_frame(
        self, socket: ClientWebSocketResponse, session: Session, outbox: Outbox, since: float
    ) -> None:
        frame = outbox.next_frame()
        self._unacknowledged.append((frame.epoch, frame.number, since))
        self._local.metrics.sent.inc(frame.events)
        await send(socket, session.frames.seal(frame.data), SILENCE_SECONDS)

    def _acknowledge(self, data: bytes) -> None:
        """Raises PeerRejected."""
        try:
            done = decode_acknowledgement(data)
        except msgspec.MsgspecError as err:
            raise PeerRejected("malformed", f"an acknowledgement is malformed: {err}") from err
        if done.needs_snapshot and self._outbox is not None and self._outbox.restart(done.epoch):
            self._is_waiting.set()
        while self._unacknowledged:
            epoch, number, since = self._unacknowledged[0]
            if (epoch, number) > (done.epoch, done.number):
                break
            self._unacknowledged.popleft()
            self._local.metrics.lag.observe(monotonic() - since)
