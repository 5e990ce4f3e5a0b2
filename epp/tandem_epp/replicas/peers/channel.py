"""All connections of this replica: resolves the addresses of its peers, dials them, listens."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from math import inf
from random import Random
from time import monotonic
from typing import Final, Protocol

from aiohttp import ClientSession

from tandem_contract import ports
from tandem_contract.commandline import HostPort
from tandem_kube.pages import listening

from ...supervised import SupervisedTask
from .dialer import Dialer, Local
from .frames import Event, encode_event
from .inbox import PeerReceiver
from .listener import GRACE_SECONDS, Listener
from .metrics import OffReason, PeerMetrics, PeerState

_LISTEN: Final = HostPort("0.0.0.0", ports.EPP_PEERS)
JOIN_SECONDS: Final = 2.0
"""Seconds for which a replica that starts waits for the snapshots of its peers before it is ready.
Too low: its first requests all go to the pods that look idle to it; too high: a peer that hangs
delays the start."""
RESOLVE_SECONDS: Final = 2.0
"""Seconds between look-ups of the peers' names. Too high: a new replica is unknown for as long."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """Where the replicas are."""

    peers: tuple[HostPort, ...] = ()
    """Names or addresses of all replicas, this one may be among them. Each address that a name
    resolves to is one replica, as with a headless Service. Empty: no channel."""
    listen: HostPort = _LISTEN
    """Address on which this replica listens for the others."""
    inherited: socket.socket | None = None
    """A socket that listens already, to be used instead of `listen`."""
    grace: float = GRACE_SECONDS
    """Seconds for which requests of a replica that is gone still count."""


class Knowledge(PeerReceiver, Protocol):
    """What this replica knows: takes in what others tell, and tells all of it to a new one."""

    def snapshot(self) -> Iterable[Event]:
        """Everything that a replica which just joined must know, bounded by its owner."""


class PeerChannel:
    """This replica's side of the channel."""

    def __init__(self, settings: PeerSettings, knowledge: Knowledge, metrics: PeerMetrics) -> None:
        self._settings = settings
        self._instance = secrets.token_hex(16)
        self._keys: Mapping[str, bytes] = {}
        self._dialers: dict[HostPort, tuple[Dialer, SupervisedTask]] = {}
        self._answers: dict[HostPort, frozenset[HostPort]] = {}
        """Name → its addresses, by the latest answer that had any."""
        self._listener = Listener(self._instance, knowledge, metrics, settings.grace)
        self._listener.on_peer = self._on_peer
        self._opened = inf
        """When `open` was called, monotonic seconds."""
        self._has_resolved = self._is_informed = False
        self._must_resolve = asyncio.Event()
        self._local = Local(
            self._instance,
            lambda: self._keys,
            lambda: map(encode_event, knowledge.snapshot()),
            metrics,
            connected={},
            epochs=count(),
        )
        self._tasks: set[asyncio.Task[None]] = set()
        metrics.states, metrics.off_reason = self._states, self._off_reason

    @property
    def connected(self) -> frozenset[str]:
        """Instances of the peers that are connected in both directions."""
        return frozenset(self._local.connected.keys() & self._listener.peers)

    @property
    def dialing(self) -> int:
        """Addresses that this replica connects to: without its own, and other ones of peers that
        are connected."""
        return len(list(self._states()))

    @property
    def has_peers(self) -> bool:
        """Whether a peer is connected."""
        return bool(self._local.connected)

    @property
    def rank(self) -> tuple[int, int]:
        """This replica's place among all that are connected and itself, by their instances, and
        their number."""
        peers = self.connected
        return sum(peer < self._instance for peer in peers), len(peers) + 1

    @property
    def replicas(self) -> int:
        """Replicas that there are, as far as is known: this one, and those that it connects to."""
        # Without keys it cannot tell which address is its own.
        return self.dialing + 1 if self._keys else max(1, self.dialing)

    @property
    def is_informed(self) -> bool:
        """Whether the snapshot of each peer that can be reached has come, or JOIN_SECONDS have
        passed since `open`. Stays True afterwards."""
        self._is_informed = (
            self._is_informed or self._off_reason() is not None or self._has_snapshots()
        )
        return self._is_informed

    def open(self) -> None:
        """Take in what peers tell from now on: this replica knows its pods."""
        self._listener.is_open = True
        self._opened = min(self._opened, monotonic())

    def publish(self, event: Event) -> None:
        """Tell all connected peers; never waits."""
        if self.has_peers:
            # Encoded once for all.
            encoded = encode_event(event)
            for dialer in self._local.connected.values():
                dialer.put(encoded)

    def use_keys(self, keys: Mapping[str, bytes]) -> None:
        """Authenticate with `keys` from now on. A connection ends when its key is removed."""
        revoked = {name for name, secret in self._keys.items() if keys.get(name) != secret}
        self._keys = self._listener.keys = dict(keys)
        if self._off_reason() is OffReason.NO_KEYS:
            _log.warning(
                "the EPP's replicas do not exchange what they know: without plan keys they cannot "
                "authenticate each other (--plan-key-dir)"
            )
        if revoked and self._dialers:
            dialers = (dialer for dialer, _ in self._dialers.values())
            parts: list[Listener | Dialer] = [self._listener, *dialers]
            for part in parts:
                task = asyncio.create_task(part.close_revoked(revoked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen and dial; without peers nothing runs. Raises OSError when the port is in use."""
        if not self._settings.peers:
            yield
            return
        address = self._settings.inherited or self._settings.listen
        # The sessions of dialers never end, so there is no total timeout.
        async with (
            ClientSession() as client,
            listening(self._listener.app(), address, "--peer-listen"),
        ):
            resolving = SupervisedTask("the look-up of replicas", lambda: self._resolve(client))
            try:
                yield
            finally:
                # First, so that no dialer is added.
                resolving.cancel()
                await resolving.wait()
                dialing = [task for _, task in self._dialers.values()]
                for dialer in dialing:
                    dialer.cancel()
                for task in self._tasks:
                    task.cancel()
                closing = [dialer.wait() for dialer in dialing]
                await asyncio.gather(*closing, *self._tasks, return_exceptions=True)
                await self._listener.close()

    async def _resolve(self, client: ClientSession) -> None:
        """Keep one dialer per address."""
        while True:
            self._must_resolve.clear()
            # A name that does not resolve keeps its addresses: the DNS may be what is gone.
            self._answers |= await resolve(self._settings.peers)
            addresses = frozenset[HostPort]().union(*self._answers.values())
            for address in addresses - self._dialers.keys():
                self._dial(address, client)
            for address in self._dialers.keys() - addresses:
                dialer, task = self._dialers[address]
                # A connection that works is worth more than an answer of the DNS.
                if dialer.state is not PeerState.CONNECTED:
                    task.cancel()
                    del self._dialers[address]
            self._has_resolved = True
            try:
                async with asyncio.timeout(RESOLVE_SECONDS):
                    await self._must_resolve.wait()
            except TimeoutError:
                pass

    def _on_peer(self, peer: str) -> None:
        """A peer connected to this replica: connect to it at once, for it waits for a snapshot."""
        if peer != self._instance and peer not in self._local.connected:
            self._must_resolve.set()
            for dialer, _ in self._dialers.values():
                dialer.retry()

    def _has_snapshots(self) -> bool:
        if monotonic() - self._opened >= JOIN_SECONDS:
            return True
        has_tried_all = all(dialer.has_tried for dialer, _ in self._dialers.values())
        peers = self._local.connected.keys()
        return self._has_resolved and has_tried_all and peers <= self._listener.informants

    def _dial(self, address: HostPort, client: ClientSession) -> None:
        dialer = Dialer(address, self._local, Random())
        name = f"the connection to the EPP replica {address}"
        task = SupervisedTask(name, lambda: dialer.run(client), dialer.on_error)
        self._dialers[address] = (dialer, task)

    def _states(self) -> Iterable[PeerState]:
        return (dialer.state for dialer, _ in self._dialers.values() if dialer.state is not None)

    def _off_reason(self) -> OffReason | None:
        if not self._settings.peers:
            return OffReason.NO_PEERS
        return None if self._keys else OffReason.NO_KEYS


async def resolve(names: Sequence[HostPort]) -> dict[HostPort, frozenset[HostPort]]:
    """The addresses of `names`, without those that cannot be resolved now."""
    loop = asyncio.get_running_loop()
    answers = await asyncio.gather(
        *(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM) for host, port in names),
        return_exceptions=True,
    )
    return {
        name: frozenset(HostPort(str(address[0]), name.port) for *_, address in infos)
        for name, infos in zip(names, answers, strict=True)
        if not isinstance(infos, BaseException)
    }
