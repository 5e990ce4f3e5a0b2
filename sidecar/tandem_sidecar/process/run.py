"""One sidecar process: listens, serves until a signal, drains, ends.

Errors: `CannotListen`: a port is taken or an address is not this machine's.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from tandem_contract.commandline import HostPort

from ..connectors.nixl import Nixl
from ..handoff.exchange import Tools
from ..handoff.lifecycle import Lifecycle
from ..handoff.proxy import Proxy
from ..http.server import Server
from ..http.upstream import Pool
from ..seeing.metrics import Metrics
from ..settings import Settings
from ..trust.plan_keys import RELOAD_SECONDS, PlanKeys
from .admin import Admin
from .health import EngineHealth

log = logging.getLogger(__name__)

_FLUSH_SECONDS: Final = 2.0
"""For clients to take the last bytes written to them."""


class CannotListen(OSError):
    """The message says where and why."""


@dataclass(frozen=True, slots=True)
class Running:
    """A started sidecar; ports are the ones bound, should 0 have been asked."""

    listen: HostPort
    admin: HostPort
    lifecycle: Lifecycle
    health: EngineHealth


async def run(settings: Settings, keys: PlanKeys) -> None:
    """Serve until SIGTERM or SIGINT and drain; a second signal ends at once.

    Raises CannotListen.
    """
    loop = asyncio.get_running_loop()
    asked, again = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with started(settings, keys) as running:
        print(  # noqa: T201 - the readiness line
            f"tandem-sidecar: serving on {running.listen}, admin on {running.admin},"
            f" decoding on {settings.engine}",
            file=sys.stderr,
            flush=True,
        )
        await asked.wait()
        running.lifecycle.drain()
        waits = [asyncio.ensure_future(w) for w in (running.lifecycle.idle(), again.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


@asynccontextmanager
async def started(settings: Settings, keys: PlanKeys) -> AsyncIterator[Running]:
    """A sidecar that listens, closed at the end. Raises CannotListen, nothing left started."""
    loop = asyncio.get_running_loop()
    pool, metrics = Pool(), Metrics()
    lifecycle = Lifecycle(settings.drain_timeout)
    tools = Tools(settings, pool, Nixl(), metrics, lifecycle)
    clients = Server(Proxy(tools, keys), settings.limits)
    health = EngineHealth(pool, settings.engine)
    async with AsyncExitStack() as stack:
        stack.callback(pool.close)
        stack.push_async_callback(_flush, clients)
        try:
            server = await loop.create_server(clients.client, *settings.listen, backlog=1024)
        except OSError as err:
            raise _cannot(settings.listen, "--listen", err) from err
        stack.callback(server.close)
        admin = Admin(metrics, lifecycle, health)
        runner = web.AppRunner(admin.app(), access_log=None, shutdown_timeout=1.0)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        try:
            await web.TCPSite(runner, *settings.admin).start()
        except OSError as err:
            raise _cannot(settings.admin, "--admin", err) from err
        for chore in (health.watch(), _follow(keys)):
            stack.push_async_callback(_stop, loop.create_task(chore))
        bound = HostPort(settings.listen.host, server.sockets[0].getsockname()[1])
        admin_bound = HostPort(settings.admin.host, runner.addresses[0][1])
        yield Running(bound, admin_bound, lifecycle, health)


async def _follow(keys: PlanKeys) -> None:
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        keys.reload()


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _flush(clients: Server) -> None:
    """Close the clients and give them time to take what was written."""
    clients.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_SECONDS):
            await clients.closed()


def _cannot(address: HostPort, flag: str, err: OSError) -> CannotListen:
    lookup = isinstance(err, socket.gaierror) or err.errno is None
    reason = str(err.strerror or err) if lookup else os.strerror(err.errno or 0)
    return CannotListen(f"{flag} {address}: cannot listen there: {reason.lower()}")
