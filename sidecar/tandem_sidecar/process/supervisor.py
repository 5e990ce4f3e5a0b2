"""Several processes that serve one listening socket, and the one that watches them.

    await supervise(settings, source, arguments)

The supervisor binds, starts the workers and answers the admin port; it serves no client. A worker
is this command again, with the same arguments and its `Place`: the shared socket, so that a
connection not yet accepted outlives any worker, and a Unix socket where it answers for itself.
Its standard input ends with the supervisor, and so does the worker.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from tandem_contract import endpoints

from ..http.upstream import Pool
from ..observability import logs
from ..observability.engine_counters import metrics_page
from ..security.credentials import EngineTls
from ..settings import Settings
from .admin import serving
from .aggregate import Families, lasting, summed
from .listen import bound, listen
from .reload import Reloader, Source
from .supervisor_admin import SupervisorAdmin
from .worker import Worker, WorkerFailed, WorkerSilent

log = logging.getLogger(__name__)

__all__ = ["WorkerFailed", "supervise"]

_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 30.0
"""Seconds before a worker that ended is replaced, doubled from the first to the longest: one that
cannot live costs no more than a start now and then."""
_SETTLED_SECONDS: Final = 60.0
"""The first delay holds again for one that lived this long."""
_GRACE_SECONDS: Final = 10.0
"""For workers beyond their drain timeout, and to end once they are told to."""


async def supervise(settings: Settings, source: Source, arguments: Sequence[str]) -> None:
    """Serve with `settings.workers` processes until SIGTERM or SIGINT and drain.

    A second signal ends at once. Raises CannotListen and WorkerFailed, with nothing left started.
    """
    with ExitStack() as stack:
        clients = listen(settings.listen, "--listen")
        asking = listen(settings.admin, "--admin")
        for listener in (*clients, *asking):
            stack.callback(listener.close)
        fleet = Fleet(settings, clients, arguments)
        asked, again = _signals()
        pool = Pool(EngineTls(settings.tls, settings.engine).for_address)
        stack.callback(pool.close)
        admin = SupervisorAdmin(fleet, partial(metrics_page, pool, settings.engine))
        async with serving(admin.routes(), asking):
            try:
                await fleet.start()
                print(  # noqa: T201 - the readiness line
                    f"tandem-sidecar: serving on {bound(settings.listen, clients)},"
                    f" admin on {bound(settings.admin, asking)},"
                    f" decoding on {settings.engine}, {settings.workers} workers",
                    file=sys.stderr,
                    flush=True,
                )
                await _follow_until(asked, source, fleet, admin)
                await _first(fleet.stopped(), again.wait())
            finally:
                await fleet.end()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by a further SIGTERM or SIGINT."""
    asked, again = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return asked, again


async def _follow_until(
    asked: asyncio.Event, source: Source, fleet: "Fleet", admin: SupervisorAdmin
) -> None:
    reloader = Reloader(source, fleet.apply)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
    chores = [asyncio.ensure_future(chore) for chore in (reloader.watch(), admin.watch())]
    await asked.wait()
    for chore in chores:
        chore.cancel()


class Fleet:
    """The workers, kept at their number."""

    def __init__(
        self, settings: Settings, clients: Sequence[socket.socket], arguments: Sequence[str]
    ) -> None:
        self.draining = False
        self.gone: Families = {}
        self.serving: list[Worker] = []
        self._settings = settings
        self._clients = tuple(listener.fileno() for listener in clients)
        self._arguments = arguments
        self._alive: set[Worker] = set()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when all serve. Raises WorkerFailed."""
        numbers = range(self._settings.workers)
        workers = await asyncio.gather(*(self._start(number) for number in numbers))
        self._keepers = [asyncio.ensure_future(self._keep(worker)) for worker in workers]

    def apply(self, settings: Settings) -> None:
        """Have all read the configuration again, which was found good."""
        self._settings = settings
        logs.configure(settings.log_format, settings.log_level)
        for worker in self.serving:
            worker.tell(signal.SIGHUP)

    async def drain(self) -> None:
        """Have all take nothing new."""
        self.draining = True
        await asyncio.gather(
            *(_drain(worker, endpoints.DRAIN, _GRACE_SECONDS) for worker in self.serving)
        )

    async def drained(self) -> None:
        """The same, and return when nothing runs."""
        self.draining = True
        seconds = self._settings.drain_timeout + _GRACE_SECONDS
        path = endpoints.DRAIN_AND_WAIT
        await asyncio.gather(*(_drain(worker, path, seconds) for worker in self.serving))

    async def stopped(self) -> None:
        """Drain all, then end all: until the last is idle, each refuses what comes."""
        await self.drained()
        self._let_go()
        for worker in self._alive:
            worker.tell(signal.SIGTERM)
        await self._all_ended()

    async def end(self) -> None:
        """Leave none running."""
        self._let_go()
        for number in (signal.SIGQUIT, signal.SIGKILL):
            for worker in self._alive:
                worker.tell(number)
            await self._all_ended()

    async def _all_ended(self) -> None:
        waits = [asyncio.ensure_future(worker.ended()) for worker in self._alive]
        if waits:
            await asyncio.wait(waits, timeout=_GRACE_SECONDS)

    def _let_go(self) -> None:
        """Replace none any more."""
        for keeper in self._keepers:
            keeper.cancel()

    async def _start(self, number: int) -> Worker:
        worker = await Worker.spawn(number, self._clients, self._arguments)
        self._alive.add(worker)
        await worker.ready()
        self.serving.append(worker)
        return worker

    async def _keep(self, worker: Worker) -> None:
        loop, delay = asyncio.get_running_loop(), _FIRST_DELAY
        while True:
            began = loop.time()
            status = await worker.ended()
            self._left(worker)
            log.error("worker %d (pid %d) ended with status %d", worker.number, worker.pid, status)
            if loop.time() - began > _SETTLED_SECONDS:
                delay = _FIRST_DELAY
            worker, delay = await self._replace(worker.number, delay)

    def _left(self, worker: Worker) -> None:
        self._alive.discard(worker)
        self.serving.remove(worker)
        self.gone = summed([self.gone, lasting(worker.page)])

    async def _replace(self, number: int, delay: float) -> tuple[Worker, float]:
        """Another worker, and the delay for the one after it."""
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)
            try:
                worker = await self._start(number)
            except (WorkerFailed, OSError) as err:
                log.error("%s: again in %.3gs", err, delay)
                continue
            # What was asked of the others while it started.
            worker.tell(signal.SIGHUP)
            if self.draining:
                await _drain(worker, endpoints.DRAIN, _GRACE_SECONDS)
            return worker, delay


async def _drain(worker: Worker, path: str, seconds: float) -> None:
    try:
        await worker.ask(path, method="POST", seconds=seconds)
    except WorkerSilent as err:
        log.warning("not drained: %s", err)


async def _first(*waits: Awaitable[object]) -> None:
    """Return when one of them does, the others cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()
