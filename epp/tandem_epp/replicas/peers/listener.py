"""Connections from peers: authenticates each, applies its frames and acknowledges them. Those that
have not shown yet that they are a peer's are bounded in number and time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager
from time import time
from typing import Final

import msgspec
from aiohttp import web

from tandem_contract.peer_handshake import Hello, PeerRejected, Proof, Session

from .frames import HANDSHAKE, PATH, decode_frame, encode_acknowledgement
from .inbox import Inbox, PeerReceiver, Verdict
from .messages import MAX_MESSAGE, REFUSED, PeerError, PeerGone, decode, receive, send
from .metrics import PeerMetrics


class HandshakeLimit:
    """Admits every connection, and ends others for it: of the address that has most of them, the
    oldest. So clients without a key cannot keep peers out."""

    def __init__(self, most: int, seconds: float) -> None:
        """`most`: connections at a time; `seconds`: what each may take."""
        self._most, self._seconds = most, seconds
        self._under_way: dict[asyncio.Timeout, str | None] = {}
        """Time limit → remote address, the oldest first."""

    @asynccontextmanager
    async def admitted(self, remote: str | None) -> AsyncIterator[None]:
        """Raises PeerGone if the block takes too long, or when it must make room."""
        if len(self._under_way) >= self._most:
            self._make_room()
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._under_way[limit] = remote
                try:
                    yield
                finally:
                    self._under_way.pop(limit, None)
        except TimeoutError as err:
            raise PeerGone("the handshake took too long") from err

    def _make_room(self) -> None:
        ((busiest, _),) = Counter(self._under_way.values()).most_common(1)
        oldest = next(limit for limit, remote in self._under_way.items() if remote == busiest)
        # At once: the next connection must not choose it again.
        del self._under_way[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())


HANDSHAKE_SECONDS: Final = 5.0
"""Seconds from a connection to its first frame."""
SILENCE_SECONDS: Final = 5.0
"""Seconds without a message after which a connection counts as broken; heartbeats come every
second. Too low: a replica that pauses is dropped; too high: a dead one counts for longer."""
GRACE_SECONDS: Final = 10.0
"""Seconds for which the requests of a peer that is gone still count: most of them run on, because
Envoy and the pods do not need the EPP for them. Too low: the pods look idle when an EPP restarts;
too high: pods that have finished these requests get none."""
MAX_HANDSHAKES: Final = 64
"""Connections that have not sent their first frame; see `HandshakeLimit`. Too low: replicas that
start together disturb each other; too high: memory for clients without a key."""
MAX_CONNECTIONS: Final = 256
"""Authenticated connections; further ones are refused."""

_log: Final = logging.getLogger(__name__)


class Listener:
    """What this replica receives."""

    def __init__(
        self,
        instance: str,
        receiver: PeerReceiver,
        metrics: PeerMetrics,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """`grace` is in seconds."""
        self.is_open = False
        """Whether this replica takes in what peers tell. Until then it refuses them with 503, since
        events about pods that it does not know yet would be lost."""
        self.on_peer: Callable[[str], None] = lambda peer: None
        """Called with each peer that connects."""
        self.keys: Mapping[str, bytes] = {}
        self._instance, self._receiver, self._metrics = instance, receiver, metrics
        self._grace = grace
        self._inboxes: dict[str, Inbox] = {}
        """Peer → its inbox, from its first connection until it is forgotten."""
        self._current: dict[str, tuple[Session, web.WebSocketResponse]] = {}
        """Peer → its latest connection."""
        self._forgetting: dict[str, asyncio.TimerHandle] = {}
        """Peers that are gone, until they are forgotten."""
        self._handshakes = HandshakeLimit(MAX_HANDSHAKES, HANDSHAKE_SECONDS)
        self._connections = 0
        """Those that are authenticated."""
        self._reported: set[tuple[str | None, str]] = set()
        """Addresses and reasons of refusals in the log."""

    @property
    def peers(self) -> set[str]:
        """Peers that are connected to this replica."""
        return set(self._current)

    @property
    def informants(self) -> set[str]:
        """Peers whose whole snapshot has come."""
        return {peer for peer, inbox in self._inboxes.items() if inbox.is_complete}

    def app(self) -> web.Application:
        """The server's application."""
        app = web.Application()
        app.add_routes([web.get(PATH, self._serve)])
        return app

    async def close_revoked(self, revoked: Set[str]) -> None:
        """Close connections that use one of the `revoked` keys."""
        for session, socket in list(self._current.values()):
            if session.key in revoked:
                await socket.close(code=REFUSED, message=b"key removed")

    async def close(self) -> None:
        """Close all connections; nothing runs afterwards."""
        for _, socket in list(self._current.values()):
            await socket.close()
        for timer in self._forgetting.values():
            timer.cancel()
        self._forgetting.clear()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not self.keys or not self.is_open:
            return web.Response(status=503 if self.keys else 403)
        socket = web.WebSocketResponse(
            max_msg_size=MAX_MESSAGE, compress=False, timeout=HANDSHAKE_SECONDS
        )
        await socket.prepare(request)
        try:
            if (first := await self._admit(socket, request)) is not None:
                await self._receive(socket, *first)
        except PeerRejected as err:
            self._metrics.refused.labels(err.reason).inc()
            self._report(request.remote, err)
            await socket.close(code=REFUSED, message=err.reason.encode())
        except PeerError as err:
            _log.info("lost the connection from the EPP replica %s: %s", request.remote, err)
        return socket

    async def _admit(
        self, socket: web.WebSocketResponse, request: web.Request
    ) -> tuple[Session, bytes] | None:
        """The session and the first frame; None if none came. Raises PeerRejected."""
        try:
            async with self._handshakes.admitted(request.remote):
                session = await self._handshake(socket)
                self.on_peer(session.peer)
                return session, session.frames.open(await receive(socket, HANDSHAKE_SECONDS))
        except PeerGone:
            # Not worth a log: a dialer that finds itself, or a peer that it is connected to
            # already, sends no frame. Any client may connect and be silent.
            if request.transport is not None:
                request.transport.abort()
            return None

    async def _receive(self, socket: web.WebSocketResponse, session: Session, data: bytes) -> None:
        """Take in the frame `data` and all that follow. Raises PeerRejected or PeerError when
        the connection must end."""
        if self._connections >= MAX_CONNECTIONS:
            raise PeerRejected("too_many", "too many connections from other replicas")
        peer = session.peer
        _, previous = self._current.get(peer, (None, None))
        self._current[peer] = (session, socket)
        self._connections += 1
        try:
            if previous is not None:
                # A dialer sends on one connection at a time, so it has given up the previous one.
                await previous.close()
            if (timer := self._forgetting.pop(peer, None)) is not None:
                timer.cancel()
            await self._apply_frames(socket, session, data)
        finally:
            self._connections -= 1
            if self._current.get(peer) == (session, socket):
                del self._current[peer]
                loop = asyncio.get_running_loop()
                self._forgetting[peer] = loop.call_later(self._grace, self._forget, peer)

    async def _handshake(self, socket: web.WebSocketResponse) -> Session:
        first = decode(await receive(socket, HANDSHAKE_SECONDS), Hello)
        answer = HANDSHAKE.challenge(first, self._instance, self.keys, time())
        await send(socket, msgspec.msgpack.encode(answer), HANDSHAKE_SECONDS)
        proof = decode(await receive(socket, HANDSHAKE_SECONDS), Proof)
        return HANDSHAKE.accept(proof, first, answer, self.keys)

    async def _apply_frames(
        self, socket: web.WebSocketResponse, session: Session, data: bytes
    ) -> None:
        """Apply the frame `data` and all that follow."""
        inbox = self._inboxes.get(session.peer)
        if inbox is None:
            inbox = Inbox(session.peer, self._receiver, self._count)
            self._inboxes[session.peer] = inbox
        while True:
            try:
                frame = decode_frame(data)
                inbox.receive(frame)
            except msgspec.MsgspecError as err:
                raise PeerRejected("malformed", f"a frame is malformed: {err}") from err
            answer = encode_acknowledgement(frame, needs_snapshot=inbox.needs_snapshot)
            sealed = session.acknowledgements.seal(answer)
            await send(socket, sealed, SILENCE_SECONDS)
            data = session.frames.open(await receive(socket, SILENCE_SECONDS))

    def _count(self, verdict: Verdict, events: int) -> None:
        if events:
            self._metrics.received.labels(verdict).inc(events)

    def _report(self, remote: str | None, refusal: PeerRejected) -> None:
        """Log a refusal once: a peer comes again every two seconds."""
        # Bounded: any address in the cluster may connect.
        if (remote, refusal.reason) not in self._reported and len(self._reported) < 100:
            self._reported.add((remote, refusal.reason))
            _log.warning("refused the EPP replica %s: %s", remote, refusal)

    def _forget(self, peer: str) -> None:
        """The peer did not come back: its requests no longer count."""
        del self._forgetting[peer], self._inboxes[peer]
        self._receiver.reset(peer)
