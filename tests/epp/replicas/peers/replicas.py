"""Replicas of an EPP in this process, connected over real sockets, and a link that can be cut."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from tandem_contract.commandline import HostPort
from tandem_epp.replicas.peers.channel import PeerChannel, PeerSettings
from tandem_epp.replicas.peers.frames import Event, RequestEnded, RequestStarted
from tandem_epp.replicas.peers.metrics import PeerMetrics
from tandem_local.ports import free_port

KEYS = {"k1": b"first secret of sixteen bytes"}
OTHER_KEYS = {"k2": b"second secret of sixteen bytes"}
LOOPBACK = "127.0.0.1"


class Notebook:
    """The simplest knowledge: own requests, and those of each peer."""

    def __init__(self) -> None:
        self.own: dict[int, RequestStarted] = {}
        self.peers: dict[str, dict[int, RequestStarted]] = {}
        self.events: list[Event] = []
        self.changed = asyncio.Event()
        self.has_lost = False
        """Whether events were lost that a snapshot brings back."""

    def snapshot(self) -> Iterable[Event]:
        return list(self.own.values())

    def lacks_snapshot(self, peer: str) -> bool:
        return self.has_lost

    def reset(self, peer: str) -> None:
        self.peers[peer] = {}
        self.has_lost = False
        self.changed.set()

    def apply(self, peer: str, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, RequestStarted):
            self.peers[peer][event.request] = event
        if isinstance(event, RequestEnded):
            self.peers[peer].pop(event.request, None)
        self.changed.set()

    @property
    def remote(self) -> set[int]:
        """Numbers of the requests that run elsewhere."""
        return {number for requests in self.peers.values() for number in requests}

    async def until(self, condition: Callable[[], bool], within: float = 20.0) -> None:
        """Wait until `condition` is true; raises TimeoutError after `within` seconds."""
        async with asyncio.timeout(within):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Replica:
    """One replica's channel and what it knows."""

    channel: PeerChannel
    notes: Notebook
    registry: CollectorRegistry
    address: HostPort

    def start(self, number: int, **more: object) -> None:
        """Place a request."""
        event = RequestStarted(number, "d", **more)  # type: ignore[arg-type]
        self.notes.own[number] = event
        self.channel.publish(event)

    def end(self, number: int) -> None:
        """End a request."""
        del self.notes.own[number]
        self.channel.publish(RequestEnded(number))

    def figure(self, name: str, **labels: str) -> float:
        """A metric's value; 0 for a child that does not exist yet."""
        return self.registry.get_sample_value(name, labels) or 0.0


@dataclass
class Link:
    """A TCP relay to `target` that can be cut and mended."""

    target: HostPort
    address: HostPort = field(default_factory=lambda: HostPort(LOOPBACK, free_port(LOOPBACK)))
    is_cut: bool = False
    connections: int = 0
    """Made so far."""
    _streams: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut(self) -> None:
        """Reset all connections, and each new one."""
        self.is_cut = True
        for stream in self._streams:
            stream.transport.abort()

    def mend(self) -> None:
        self.is_cut = False

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        self.connections += 1
        try:
            if self.is_cut:
                return
            upstream, to_upstream = await asyncio.open_connection(*self.target)
            self._streams.add(to_upstream)
            await asyncio.gather(_copy(reader, to_upstream), _copy(upstream, writer))
        except OSError:
            pass
        finally:
            for stream in list(self._streams):
                if stream is writer or stream.is_closing():
                    stream.transport.abort()
                    self._streams.discard(stream)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def linked(target: HostPort) -> AsyncIterator[Link]:
    link = Link(target)
    server = await asyncio.start_server(link.relay, *link.address)
    try:
        yield link
    finally:
        link.cut()
        server.close()
        await server.wait_closed()


def new_address() -> HostPort:
    return HostPort(LOOPBACK, free_port(LOOPBACK))


@asynccontextmanager
async def replica(
    address: HostPort,
    *peers: HostPort,
    keys: dict[str, bytes] = KEYS,
    grace: float = 0.2,
    is_open: bool = True,
) -> AsyncIterator[Replica]:
    """A running replica that listens on `address`."""
    registry = CollectorRegistry()
    notes = Notebook()
    settings = PeerSettings(peers=peers, listen=address, grace=grace)
    channel = PeerChannel(settings, notes, PeerMetrics(registry))
    channel.use_keys(keys)
    async with channel.running():
        if is_open:
            channel.open()
        yield Replica(channel, notes, registry, address)


@asynccontextmanager
async def mesh(count: int, **settings: float) -> AsyncIterator[list[Replica]]:
    """`count` replicas, each of which knows all addresses, its own among them."""
    addresses = [new_address() for _ in range(count)]
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(replica(address, *addresses, **settings))  # type: ignore[arg-type]
            for address in addresses
        ]
        for each in replicas:
            await until(lambda each=each: len(each.channel.connected) == count - 1)  # type: ignore[misc]
        yield replicas


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    """Wait until `condition` is true; raises TimeoutError after `within` seconds."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)
