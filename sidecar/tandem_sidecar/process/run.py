"""One sidecar process: listens, serves until a signal, drains, ends."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from tandem_contract.commandline import HostPort

from ..handoff.lifecycle import Lifecycle
from ..http.server import Server
from ..observability import logs
from ..security.credentials import RELOAD_SECONDS, EngineTls, PlanKeys
from ..settings import Settings
from .admin import serving
from .health import EngineHealth
from .listen import CannotListen, bound, listen
from .reload import Reloader, Source
from .wiring import Parts

__all__ = ["CannotListen", "Place", "Running", "run", "started"]

_FLUSH_SECONDS: Final = 2.0
"""For clients to take the last bytes written to them."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a supervisor gives one of its workers."""

    number: int
    """From 0."""
    clients: tuple[int, ...]
    """Descriptors of the listening sockets that all workers share."""
    admin: int
    """That of the Unix socket where the supervisor asks it."""

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.number}:{','.join(map(str, self.clients))}:{self.admin}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """What a supervisor wrote. Raises ValueError."""
        number, clients, admin = text.split(":")
        return cls(int(number), tuple(int(c) for c in clients.split(",")), int(admin))


@dataclass(frozen=True, slots=True)
class Running:
    """A started sidecar; ports are the ones bound, should 0 have been asked."""

    listen: HostPort
    admin: HostPort
    lifecycle: Lifecycle
    health: EngineHealth
    apply: Callable[[Settings], None]
    """Take over settings, from the next request on: those of `reload.LIVE`."""


async def run(
    settings: Settings, keys: PlanKeys, source: Source, place: Place | None = None
) -> None:
    """Serve until SIGTERM or SIGINT and drain; a second signal ends at once.

    A worker ends when its supervisor does, and drains once however often it is told. Raises
    CannotListen.
    """
    loop = asyncio.get_running_loop()
    asked, again = asyncio.Event(), asyncio.Event()
    _listen_to_signals(asked, again, place)
    async with started(settings, keys, place) as running:

        def apply(new: Settings) -> None:
            logs.configure(new.log_format, new.log_level)
            running.apply(new)

        level = logging.INFO if place is None else logging.DEBUG
        reloader = Reloader(source, apply, level=level)
        loop.add_signal_handler(signal.SIGHUP, reloader.reload)
        following = loop.create_task(reloader.watch()) if place is None else None
        _say_ready(running, settings, place)
        await asked.wait()
        running.lifecycle.drain()
        waits = [asyncio.ensure_future(w) for w in (running.lifecycle.idle(), again.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in [*waits, *([following] if following else [])]:
            wait.cancel()


def _listen_to_signals(asked: asyncio.Event, again: asyncio.Event, place: Place | None) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (again if asked.is_set() else asked).set()

    def stop_now() -> None:
        asked.set()
        again.set()

    def supervisor_said() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            asked.set()

    if place is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
    else:
        loop.add_signal_handler(signal.SIGTERM, asked.set)
        loop.add_signal_handler(signal.SIGQUIT, stop_now)
        loop.add_reader(sys.stdin.fileno(), supervisor_said)


def _say_ready(running: Running, settings: Settings, place: Place | None) -> None:
    if place is not None:
        os.write(sys.stdout.fileno(), b"\n")
        return
    print(  # noqa: T201 - the readiness line
        f"tandem-sidecar: serving on {running.listen}, admin on {running.admin},"
        f" decoding on {settings.engine}",
        file=sys.stderr,
        flush=True,
    )


@asynccontextmanager
async def started(
    settings: Settings, keys: PlanKeys, place: Place | None = None
) -> AsyncIterator[Running]:
    """A sidecar that listens, closed at the end. Raises CannotListen, nothing left started."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        parts = Parts(settings, keys, stack, alone=place is None)
        stack.push_async_callback(_flush, parts.clients)
        listening, asking = _sockets(settings, place, stack)
        where = bound(settings.listen, listening), bound(settings.admin, asking)
        parts.clients.listen(listening)
        stack.callback(parts.clients.stop_listening)
        await stack.enter_async_context(serving(parts.admin.routes(), asking))
        for chore in (*parts.chores(), _follow(keys, parts.certificates)):
            stack.push_async_callback(_stop, loop.create_task(chore))
        yield Running(*where, parts.lifecycle, parts.health, parts.apply)


def _sockets(
    settings: Settings, place: Place | None, stack: AsyncExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Where clients connect, and where the admin port is asked."""
    if place is not None:
        inherited = [socket.socket(fileno=number) for number in (*place.clients, place.admin)]
        return inherited[:-1], inherited[-1:]
    pair = []
    for address, flag in ((settings.listen, "--listen"), (settings.admin, "--admin")):
        pair.append(listen(address, flag))
        for listener in pair[-1]:
            stack.callback(listener.close)
    return pair[0], pair[1]


async def _follow(keys: PlanKeys, certificates: EngineTls) -> None:
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        keys.reload()
        certificates.reload()


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
