"""One sidecar process: binds its sockets, serves until a signal, drains, exits.

uvloop.run(run(settings, keys, source))
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tandem_contract.commandline import HostPort
from tandem_contract.overlaps import Overlaps
from tandem_contract.plan_keys import PlanKeys
from tandem_http1.server import Server

from ..handoff.context import Lifecycle
from ..observability import logs
from ..security.credentials import RELOAD_SECONDS, Credentials
from ..settings import Settings
from .admin import AdminHandlers, serve_admin
from .engine_client import EngineHealth
from .listen import WorkerSockets, bound_address, listen_for_admin, listen_for_clients
from .reload import Reloader, Source
from .wiring import Components

_FLUSH_SECONDS: Final = 2.0
"""Seconds for clients to receive the last bytes written to them."""


@dataclass(frozen=True, slots=True)
class RunningSidecar:
    """A started sidecar; the addresses have the ports that were bound."""

    listen: HostPort
    admin: HostPort
    lifecycle: Lifecycle
    health: EngineHealth
    overlaps: Overlaps
    """The prompts that engines compute; none is left once no request runs."""
    apply: Callable[[Settings], None]
    """Use other settings from the next request on, as far as `reload.LIVE` allows."""


class StopSignals:
    """Events set by the signals that end a process."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        """Drain, then exit."""
        self.exit_now = asyncio.Event()
        """Exit without waiting for requests."""

    def install(self) -> None:
        """SIGTERM or SIGINT begins the drain; a second one exits at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def install_in_worker(self) -> None:
        """SIGTERM, or the end of the supervisor, begins the drain; SIGQUIT exits at once.

        A repeated SIGTERM changes nothing: a worker may be told to drain by more than one path.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain.set)
        loop.add_signal_handler(signal.SIGQUIT, self._on_quit)
        loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def _on_signal(self) -> None:
        (self.exit_now if self.drain.is_set() else self.drain).set()

    def _on_quit(self) -> None:
        self.drain.set()
        self.exit_now.set()

    def _on_stdin(self) -> None:
        # The supervisor holds the other end of the pipe and writes nothing: end of file means that
        # it has exited, however that happened.
        if not os.read(sys.stdin.fileno(), 1):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.drain.set()


async def run(
    settings: Settings, keys: PlanKeys, source: Source, sockets: WorkerSockets | None = None
) -> None:
    """Serve until a signal, drain, return; `sockets` are those of a worker. Raises CannotListen."""
    # Installed before anything is started: a signal during the start leads to a drain, too.
    signals = StopSignals()
    if sockets is None:
        signals.install()
    else:
        signals.install_in_worker()
    async with start(settings, keys, sockets) as running:

        def apply(new: Settings) -> None:
            logs.configure(new.log_format, new.log_level)
            running.apply(new)

        # Of several workers, the supervisor follows the file and logs the change once.
        level = logging.INFO if sockets is None else logging.DEBUG
        reloader = Reloader(source, apply, level=level)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reloader.reload)
        following = loop.create_task(reloader.follow()) if sockets is None else None
        if sockets is None:
            print_ready(running.listen, running.admin, settings)
        else:
            os.write(sys.stdout.fileno(), b"\n")  # `WorkerProcess.ready` waits for this byte
        await signals.drain.wait()
        running.lifecycle.drain()
        # After a second signal the stack of `start` unwinds and cuts the requests that still run.
        await wait_for_first(running.lifecycle.idle(), signals.exit_now.wait())
        if following is not None:
            following.cancel()


def print_ready(serving: HostPort, admin: HostPort, settings: Settings) -> None:
    """Print the readiness line, for people and for the program that started the process."""
    workers = f", {settings.workers} workers" if settings.workers > 1 else ""
    print(  # noqa: T201 - the readiness line
        f"tandem-sidecar: serving on {serving}, admin on {admin},"
        f" decoding on {settings.engine}{workers}",
        file=sys.stderr,
        flush=True,
    )


async def wait_for_first(*awaitables: Awaitable[object]) -> None:
    """Return when one of `awaitables` does, and cancel the others. Raises what that one raises."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()


@asynccontextmanager
async def start(
    settings: Settings, keys: PlanKeys, sockets: WorkerSockets | None = None
) -> AsyncIterator[RunningSidecar]:
    """A sidecar that listens, stopped on exit. Raises CannotListen, with nothing left started."""
    async with AsyncExitStack() as stack:
        components = Components(settings, keys, stack, is_worker=sockets is not None)
        listen_at, admin_at = await serve(components, settings, sockets, stack)
        yield RunningSidecar(
            listen_at,
            admin_at,
            components.lifecycle,
            components.health,
            components.overlaps,
            components.apply,
        )


class Serving(Protocol):
    """The components of a process that listens for clients and has an admin port."""

    @property
    def server(self) -> Server:
        """Serves the clients."""

    @property
    def admin(self) -> AdminHandlers:
        """Answers on the admin port."""

    @property
    def credentials(self) -> tuple[Credentials | None, ...]:
        """Read again every `RELOAD_SECONDS`."""

    def background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the process serves."""


async def serve(
    components: Serving, settings: Settings, sockets: WorkerSockets | None, stack: AsyncExitStack
) -> tuple[HostPort, HostPort]:
    """Listen for clients and for the admin port until `stack` is closed; returns both addresses,
    with the ports that were bound. Raises CannotListen."""
    loop = asyncio.get_running_loop()
    # The stack unwinds in reverse: background tasks and admin port end first, then the listening
    # sockets, then the clients get `_FLUSH_SECONDS`, and the connections to engines close last.
    stack.push_async_callback(_flush, components.server)
    for_clients, for_admin = _open_sockets(settings, sockets, stack)
    components.server.listen(for_clients)
    stack.callback(components.server.stop_listening)
    await stack.enter_async_context(serve_admin(components.admin, for_admin))
    reloading = reload_credentials(*components.credentials)
    for coroutine in (*components.background_tasks(), reloading):
        stack.push_async_callback(_stop, loop.create_task(coroutine))
    return bound_address(settings.listen, for_clients), bound_address(settings.admin, for_admin)


def _open_sockets(
    settings: Settings, sockets: WorkerSockets | None, stack: AsyncExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """The listening sockets for clients and for the admin port: inherited ones, or new ones."""
    if sockets is not None:
        inherited = [socket.socket(fileno=number) for number in (*sockets.clients, sockets.admin)]
        return inherited[:-1], inherited[-1:]
    for_clients = listen_for_clients(settings.listen, settings.ranks)
    # At once: if the second address cannot be bound, the first one must be closed.
    for listener in for_clients:
        stack.callback(listener.close)
    for_admin = listen_for_admin(settings.admin)
    for listener in for_admin:
        stack.callback(listener.close)
    return for_clients, for_admin


async def reload_credentials(*credentials: Credentials | None) -> None:
    """Read changed files again, for as long as the process runs."""
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        for files in credentials:
            if files is not None:
                files.reload()


async def _stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _flush(server: Server) -> None:
    """Close the client connections, after the bytes written to them were sent."""
    server.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(_FLUSH_SECONDS):
            await server.closed()
