"""A full server gives a newcomer the place of a client that it waits for."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tandem_contract import connections
from tandem_contract.commandline import HostPort
from tandem_contract.connections import Connection, has_unread, to_evict
from tandem_contract.web_connections import CONNECTIONS, WebConnections
from tandem_engine.chat import ChatTemplate
from tandem_engine.metrics import EngineMetrics
from tandem_engine.served_model import ServedModel
from tandem_engine.server import EngineServer
from tandem_engine.text import Tokenizer
from tandem_epp.replicas.peers.channel import PeerChannel, PeerSettings
from tandem_epp.replicas.peers.frames import PATH
from tandem_epp.replicas.peers.metrics import PeerMetrics
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.tls import TlsSettings, tls_context
from tandem_http1.client import Limits as ProxyLimits
from tandem_kube.pages import health_app, listening
from tandem_sidecar.settings import Settings

from ..engine.fake_engine import FakeEngine, write_tokenizer
from ..engine.serving import listening as listening_here
from ..epp.replicas.peers.replicas import Notebook
from ..epp.server.http2.test_server import serving
from ..kvstore.servers import store_in_this_process
from ..router.conftest import Harness as Router
from ..sidecar.conftest import Harness as Sidecar
from ..sidecar.http.serving import ReceivedRequest
from ..sidecar.http.serving import serving as serving_requests
from .full_servers import IDLE, SLOW_BODY, SLOW_HEAD, Server, serves_newcomers

ANY_PORT = HostPort("127.0.0.1", 0)
PROXY = {"listen": ANY_PORT, "admin": ANY_PORT, "limits": ProxyLimits(connections=3)}


@dataclass(frozen=True)
class Client:
    peer: str
    state: tuple[bool, float] | None
    sock: socket.socket | None = None

    def without_progress(self, now: float) -> tuple[bool, float] | None:
        return self.state


def test_which_connection_is_closed() -> None:
    served, new = Client("a", None), Client("a", (False, 1.0))
    assert to_evict([served, new], 0.0) == []
    late, idle, older = (Client("a", s) for s in ((True, 9.0), (False, 3.0), (False, 5.0)))
    alone = Client("b", (False, 1000.0))
    assert to_evict([served, new, late, idle, older, alone], 0.0) == [older]
    assert to_evict([served, new, late, alone], 0.0) == [late]
    assert to_evict([served, alone], 0.0) == [alone]
    here, there = socket.socketpair()
    with here, there:
        asking = Client("a", (False, 7.0), here)
        assert to_evict([asking, idle, late], 0.0) == [asking]
        there.send(b"x")
        assert to_evict([asking, idle, late], 0.0) == [idle]
        assert to_evict([asking, served], 0.0) == []
    assert to_evict([asking, served], 0.0) == [asking]


@asynccontextmanager
async def store(directory: Path) -> AsyncIterator[Server]:
    async with store_in_this_process(directory, max_connections=3) as started:
        yield Server(int(started.location.endpoint.rpartition(":")[2]))


@asynccontextmanager
async def epp(_: Path) -> AsyncIterator[Server]:
    async with serving(Limits(connections=3)) as started:
        yield Server(started.port)


@asynccontextmanager
async def epp_with_tls_and_without(_: Path) -> AsyncIterator[Server]:
    tls = tls_context(TlsSettings())
    async with serving(Limits(connections=3), tls, allows_clear=True) as started:
        yield Server(started.port)


@asynccontextmanager
async def peers(_: Path) -> AsyncIterator[Server]:
    with socket.create_server(ANY_PORT) as listener:
        port = listener.getsockname()[1]
        settings = PeerSettings(peers=(HostPort("127.0.0.1", port),), inherited=listener)
        channel = PeerChannel(settings, Notebook(), PeerMetrics(CollectorRegistry()))
        async with channel.running():
            yield Server(port, CONNECTIONS, PATH)


@asynccontextmanager
async def pages(_: Path) -> AsyncIterator[Server]:
    with socket.create_server(ANY_PORT) as listener:
        async with listening(health_app(lambda: True), listener, "--health"):
            yield Server(listener.getsockname()[1], CONNECTIONS)


def engine_connections(directory: Path) -> WebConnections:
    write_tokenizer(directory)
    model = ServedModel(("m",), "/m", 64, 300, Tokenizer(directory), ChatTemplate(directory))
    return EngineServer(FakeEngine(), model, EngineMetrics("m")).connections(3)


@asynccontextmanager
async def engine(directory: Path) -> AsyncIterator[Server]:
    async with listening_here(engine_connections(directory)) as port:
        yield Server(port, path="/health")


@asynccontextmanager
async def sidecar(_: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        harness = Sidecar(stack)
        await harness.start(**PROXY)
        yield Server(harness.sidecar.listen.port)


@asynccontextmanager
async def sidecar_admin(_: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        harness = Sidecar(stack)
        await harness.start()
        yield Server(harness.sidecar.admin.port, CONNECTIONS, "/livez")


@asynccontextmanager
async def router(directory: Path) -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        harness = Router(stack, directory)
        await harness.unified("u")
        await harness.start(settings=Settings(**PROXY))
        yield Server(harness.router.listen.port)


Start = Callable[[Path], AbstractAsyncContextManager[Server]]


@pytest.mark.component
@pytest.mark.parametrize("begin", [IDLE, SLOW_HEAD, SLOW_BODY], ids=["idle", "head", "body"])
@pytest.mark.parametrize(
    "start",
    [
        *(store, epp, epp_with_tls_and_without, peers, pages),
        *(engine, sidecar, sidecar_admin, router),
    ],
)
async def test_a_newcomer_is_served_by_a_full_server(
    start: Start, begin: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LATE_SECONDS", 0.05)
    async with start(tmp_path) as server:
        assert await serves_newcomers(server, begin)


@pytest.mark.component
@pytest.mark.parametrize("kind", ["http2", "aiohttp", "proxy"])
async def test_a_client_with_unread_bytes_keeps_its_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request may be among them."""
    monkeypatch.setattr(connections, "LATE_SECONDS", 0.0)
    async with AsyncExitStack() as stack:
        opened: Callable[[], set[Connection]]
        if kind == "http2":
            http2 = await stack.enter_async_context(serving())
            port, opened = http2.port, lambda: {*http2.server.connections}
        elif kind == "aiohttp":
            web = engine_connections(tmp_path)
            port = await stack.enter_async_context(listening_here(web))
            opened = lambda: {*web._open}  # noqa: E731
        else:
            proxy = await stack.enter_async_context(serving_requests(reply=ReceivedRequest.answer))
            port, opened = proxy.address.port, lambda: {*proxy.server.clients}
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in "12"]
        async with asyncio.timeout(20):
            while len(opened()) < len(clients):
                await asyncio.sleep(0)
        # Until the next await the server reads nothing.
        clients[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        (asking,) = (each for each in opened() if has_unread(each.sock))
        now = asyncio.get_running_loop().time() + 10
        assert all(each.without_progress(now) is not None for each in opened())
        assert to_evict(opened(), now) == [*(opened() - {asking})]
