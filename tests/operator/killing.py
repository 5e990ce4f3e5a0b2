"""An HTTP proxy before the API server. It kills its client after the nth write, whose response the
client never gets, and it can interrupt watches and let their versions expire."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from tandem_kube.client import connect

_READS = ("GET", "HEAD")
_HOP = ("transfer-encoding", "connection", "content-length", "content-encoding", "host")


class Proxy:
    """Forwards the operator's plain HTTP to the API server, with an administrator's credentials."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.kubeconfig = Path()
        self.writes = 0
        """Number of write requests since `kill_after`."""
        self.before: Callable[[web.Request], Awaitable[None]] | None = None
        """Awaited before a request other than a watch is forwarded."""
        self._last: int | None = None
        self._kill: Callable[[], None] = lambda: None
        self.is_down = False
        """While true, every connection breaks when a request arrives on it."""
        self.requests_while_down = 0
        self.hidden = ""
        """Requests to paths with this prefix get 404; empty: none."""
        self._watches: set[asyncio.Task[None]] = set()
        self._connected = asyncio.Event()
        self._connected.set()
        self._silent = ""
        """Watches of paths that end with this deliver nothing; empty: none is silent."""
        self._forgetful = False
        self._expired_paths: set[str] = set()

    def cut_watches(self) -> None:
        """End every watch, and block new ones until `forget`."""
        self._connected.clear()
        for watch in self._watches:
            watch.cancel()

    def silence_watches(self, of: str = "") -> None:
        """Keep every watch open, or those of one resource (its plural), and deliver no event any
        more."""
        self._silent = of or "/"

    def go_down(self) -> None:
        """Break every connection until `come_back`."""
        self.is_down = True
        for watch in self._watches:
            watch.cancel()

    def come_back(self) -> None:
        self.is_down = False

    def forget(self) -> None:
        """Let watches start again, and answer the first of each with Expired."""
        self._forgetful = True
        self._connected.set()

    def kill_after(self, writes: int | None, kill: Callable[[], None]) -> None:
        """Call `kill` after `writes` writes; None: never."""
        self.writes, self._last, self._kill = 0, writes, kill

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            self.requests_while_down += 1
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPServiceUnavailable
        if self.hidden and request.path.startswith(self.hidden):
            raise web.HTTPNotFound
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        if "watch" in request.query:
            return await self._watch(request, headers)
        body = await request.read()
        is_write = request.method not in _READS and "dryRun" not in request.query
        if is_write and self._last is not None and self.writes >= self._last:
            raise web.HTTPServiceUnavailable  # Its sender is being killed.
        if self.before is not None:
            await self.before(request)
        async with self._session.request(
            request.method, self._url + request.raw_path, headers=headers, data=body or None
        ) as answer:
            data = await answer.read()
        if is_write:
            self.writes += 1
            if self.writes == self._last:
                self._kill()
        return web.Response(status=answer.status, body=data, content_type=answer.content_type)

    def _silences(self, path: str) -> bool:
        return self._silent == "/" or (bool(self._silent) and path.endswith(f"/{self._silent}"))

    async def _watch(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        await self._connected.wait()
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        if self._forgetful and request.path not in self._expired_paths:
            self._expired_paths.add(request.path)
            await response.write(_EXPIRED)
            return response

        async def copy() -> None:
            url = self._url + request.raw_path
            async with self._session.get(url, headers=headers) as answer:
                async for chunk in answer.content.iter_any():
                    if not self._silences(request.path):
                        await response.write(chunk)

        watch = asyncio.create_task(copy())
        self._watches.add(watch)
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        self._watches.discard(watch)
        return response


_EXPIRED = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},'
    b'"status":"Failure","message":"too old resource version","reason":"Expired","code":410}}\n'
)


@asynccontextmanager
async def proxy(admin: Path, folder: Path) -> AsyncIterator[Proxy]:
    """A proxy for the cluster of kubeconfig `admin`; its own kubeconfig is in `folder`."""
    async with await connect(admin) as api:
        configuration = api.configuration
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=True
        ) as session:
            server = Proxy(configuration.host, session)
            app = web.Application(client_max_size=1 << 24)
            app.router.add_route("*", "/{path:.*}", server.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            server.kubeconfig = folder / "proxy.kubeconfig"
            server.kubeconfig.write_text(_KUBECONFIG.format(port=port))
            try:
                yield server
            finally:
                await runner.cleanup()


_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""
