"""Several worker processes that serve the same sockets, and the supervisor that keeps them running.

    await supervise(settings, source, arguments)

The supervisor binds the sockets, starts the workers and answers the admin port; it serves no
client. A worker is this command again, with the same arguments and `--worker-sockets`: it inherits
the listening sockets, so that connections which are not yet accepted survive the exit of any
worker, and a Unix socket on which it answers the supervisor's admin requests. A worker's standard
input is a pipe from the supervisor; its end tells the worker that the supervisor has exited.

Errors: `WorkerFailed`: a worker exited before it served.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import aiohttp

from tandem_contract import endpoints
from tandem_http1.upstream import Pool

from ..observability import logs
from ..security.credentials import EngineTls
from ..security.route import UsedPlans
from ..settings import Settings
from .admin import SupervisorAdmin, WorkerSilent, serve_admin
from .aggregate import Families, cumulative_families, sum_pages
from .engine_client import fetch_all_metrics
from .listen import (
    WorkerSockets,
    bound_address,
    listen_for_admin,
    listen_for_clients,
    listen_for_supervisor,
)
from .reload import Reloader, Source
from .run import StopSignals, print_ready, reload_credentials, wait_for_first

log = logging.getLogger(__name__)

_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 30.0
"""Seconds before a worker that exited is replaced, doubled with each exit from the first to the
longest: a worker that cannot start costs no more than one attempt every 30 s."""
_STABLE_SECONDS: Final = 60.0
"""After a worker that lived this long, the next replacement waits for the first delay again."""
_GRACE_SECONDS: Final = 10.0
"""Seconds added to the drain timeout for workers to finish a drain, and between SIGTERM, SIGQUIT
and SIGKILL for them to exit."""
_REQUEST_SECONDS: Final = 5.0
"""Timeout of an admin request to a worker that does not wait for a drain."""


class WorkerFailed(RuntimeError):
    """A worker exited before it served. The reason is in its own log lines, on the same stderr."""


async def supervise(settings: Settings, source: Source, arguments: Sequence[str]) -> None:
    """Serve with `settings.workers` processes until SIGTERM or SIGINT, then drain.

    A second signal ends all at once. Raises CannotListen and WorkerFailed, with no process left.
    """
    with ExitStack() as stack:
        # Bound before any worker starts: a port in use is one error, not one per worker.
        for_clients = listen_for_clients(settings.listen, settings.ranks)
        for_admin = listen_for_admin(settings.admin)
        for listener in (*for_clients, *for_admin):
            stack.callback(listener.close)
        used_plans = UsedPlans.create()
        stack.callback(os.close, used_plans)
        flag = ("--used-plans", str(used_plans))
        command = WorkerCommand((*arguments, *flag), sockets=(used_plans,))
        supervisor = Supervisor(settings, command, for_clients)
        signals = StopSignals()
        signals.install()
        tls = EngineTls(settings.tls, settings.engine)
        pool = Pool(tls.for_address)
        stack.callback(pool.close)
        admin = SupervisorAdmin(supervisor, partial(fetch_all_metrics, pool, (settings.engine,)))
        # Before the workers start: until they serve, probes get 503, not a refused connection.
        async with serve_admin(admin, for_admin):
            try:
                await supervisor.start()
                addresses = (
                    bound_address(settings.listen, for_clients),
                    bound_address(settings.admin, for_admin),
                )
                reloader = Reloader(source, supervisor.apply)
                # First: a program that waits for the line below may send SIGHUP at once, which
                # would end a process without a handler.
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
                print_ready(*addresses, settings)
                await _until_drained(signals, supervisor, reloader, admin, tls)
            finally:
                # Also after an error at the start: no worker may outlive its supervisor.
                await supervisor.kill()


async def _until_drained(
    signals: StopSignals,
    supervisor: "Supervisor",
    reloader: Reloader,
    admin: SupervisorAdmin,
    tls: EngineTls,
) -> None:
    """Wait for the signal, then drain the workers until they end, or a second signal comes.
    Meanwhile follow settings, certificates and the engine's counters."""
    following = reloader.follow(), admin.counters.follow(), reload_credentials(tls)
    tasks = [asyncio.ensure_future(coroutine) for coroutine in following]
    try:
        await signals.drain.wait()
        await wait_for_first(supervisor.stop(), signals.exit_now.wait())
    finally:
        for task in tasks:
            task.cancel()


@dataclass(frozen=True)
class WorkerCommand:
    """How workers are started: this program again, as a worker."""

    arguments: Sequence[str]
    module: str = "tandem_sidecar.main"
    sockets: tuple[int, ...] = ()
    """File descriptors that workers inherit beside those of `--worker-sockets`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that workers have beside this process's own."""


class WorkerProcess:
    """A started worker."""

    def __init__(self, number: int, process: Process, socket_name: str) -> None:
        self.number = number
        self.pid = process.pid
        self.page: Families = {}
        """Its metrics at the last scrape that it answered."""
        self._process = process
        # A new connection for each request: a worker that exits must not leave a half-used one.
        connector = aiohttp.UnixConnector(socket_name, force_close=True)
        self._session = aiohttp.ClientSession("http://worker", connector=connector)

    @classmethod
    async def spawn(
        cls, number: int, clients: tuple[int, ...], command: WorkerCommand
    ) -> "WorkerProcess":
        """Start worker `number`. Raises OSError."""
        # The supervisor's copy of the socket is closed once the worker has inherited it: when the
        # worker exits, connecting to it fails instead of waiting for an answer.
        with listen_for_supervisor() as admin:
            sockets = WorkerSockets(number, clients, admin.fileno())
            socket_name: str = admin.getsockname().decode()
            process = await asyncio.create_subprocess_exec(
                # -P: modules in the working directory must not shadow installed ones.
                *(sys.executable, "-P", "-m", command.module),
                *command.arguments,
                *("--worker-sockets", str(sockets)),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(*clients, admin.fileno(), *command.sockets),
                env={**os.environ, **command.environment},
                # A process group of its own: Ctrl-C in a terminal goes to the supervisor alone,
                # which drains its workers.
                process_group=0,
            )
        return cls(number, process, socket_name)

    async def ready(self) -> None:
        """Return when the worker serves: it then writes one byte. Raises WorkerFailed."""
        stdout = self._process.stdout
        if stdout is None or not await stdout.read(1):
            raise WorkerFailed(f"worker {self.number} (pid {self.pid}) exited before it served")

    async def request(
        self, path: str, *, method: str = "GET", seconds: float = _REQUEST_SECONDS
    ) -> tuple[int, bytes]:
        """Send an admin request; returns status and body of the answer. Raises WorkerSilent."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, path, timeout=timeout) as answer:
                return answer.status, await answer.read()
        # RuntimeError: the session is closed, because the worker has exited meanwhile.
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as err:
            raise WorkerSilent(f"worker {self.number} (pid {self.pid}): {err}") from err

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the worker has exited."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for the worker's exit; returns its exit status."""
        status = await self._process.wait()
        await self._session.close()
        return status


class Supervisor:
    """Starts the workers and replaces those that exit."""

    def __init__(
        self, settings: Settings, command: WorkerCommand, clients: Sequence[socket.socket]
    ) -> None:
        self.draining = False
        self.exited_totals: Families = {}
        """Counters and histograms of workers that have exited."""
        self.serving: list[WorkerProcess] = []
        self._settings = settings
        self._clients = tuple(listener.fileno() for listener in clients)
        self._command = command
        self._alive: set[WorkerProcess] = set()
        """Every worker that has not exited: those in `serving`, and those that are starting."""
        self._restarters: list[asyncio.Task[None]] = []
        """One task for each worker number, which replaces its worker."""

    async def start(self) -> None:
        """Start all workers; return when all serve. Raises WorkerFailed."""
        numbers = range(self._settings.workers)
        workers = await asyncio.gather(*(self._start_worker(number) for number in numbers))
        self._restarters = [asyncio.ensure_future(self._keep_running(w)) for w in workers]

    def apply(self, settings: Settings) -> None:
        """Have all workers read the configuration again; the supervisor has validated it."""
        self._settings = settings
        logs.configure(settings.log_format, settings.log_level)
        self.reload()

    def reload(self) -> None:
        """Have all workers read the configuration again."""
        for worker in self.serving:
            worker.send_signal(signal.SIGHUP)

    async def drain(self, *, wait: bool) -> None:
        """Have all workers refuse new requests; with `wait`, return when none needs an engine."""
        # First: `_replace` drains a worker that is started from now on.
        self.draining = True
        path, seconds = endpoints.DRAIN, _GRACE_SECONDS
        if wait:
            path = endpoints.DRAIN_AND_WAIT
            seconds += self._settings.drain_timeout
        await asyncio.gather(*(_drain(worker, path, seconds) for worker in self.serving))

    async def stop(self) -> None:
        """Drain all workers, then end them.

        Until no request needs an engine, every worker keeps running and answers new requests with
        503. A worker then ends with the last stream that passes through it.
        """
        # Restarting stops only afterwards: during the drain new clients still need a worker's 503.
        await self.drain(wait=True)
        self._stop_restarting()
        for worker in self._alive:
            worker.send_signal(signal.SIGTERM)
        # The drain, which began above, limits what still passes through them.
        await self._wait_for_all(self._settings.drain_timeout + _GRACE_SECONDS)

    async def kill(self) -> None:
        """End every worker that still runs."""
        self._stop_restarting()
        # SIGQUIT lets a worker close its connections in order; SIGKILL is for one that hangs.
        for number in (signal.SIGQUIT, signal.SIGKILL):
            for worker in self._alive:
                worker.send_signal(number)
            await self._wait_for_all(_GRACE_SECONDS)

    async def _wait_for_all(self, seconds: float) -> None:
        waits = [asyncio.ensure_future(worker.wait()) for worker in self._alive]
        if waits:
            await asyncio.wait(waits, timeout=seconds)

    def _stop_restarting(self) -> None:
        for restarter in self._restarters:
            restarter.cancel()

    async def _start_worker(self, number: int) -> WorkerProcess:
        worker = await WorkerProcess.spawn(number, self._clients, self._command)
        # Before `ready`: a worker that hangs at its start must be ended with the others.
        self._alive.add(worker)
        await worker.ready()
        self.serving.append(worker)
        return worker

    async def _keep_running(self, worker: WorkerProcess) -> None:
        """Replace `worker` and its successors when they exit, forever."""
        loop, delay = asyncio.get_running_loop(), _FIRST_DELAY
        while True:
            started = loop.time()
            status = await worker.wait()
            self._remove(worker)
            log.error("worker %d (pid %d) exited with status %d", worker.number, worker.pid, status)
            if loop.time() - started > _STABLE_SECONDS:
                delay = _FIRST_DELAY
            worker, delay = await self._replace(worker.number, delay)

    def _remove(self, worker: WorkerProcess) -> None:
        self._alive.discard(worker)
        self.serving.remove(worker)
        # What the worker counted after its last scrape is lost with it.
        self.exited_totals = sum_pages([self.exited_totals, cumulative_families(worker.page)])

    async def _replace(self, number: int, delay: float) -> tuple[WorkerProcess, float]:
        """Start a worker after `delay` seconds; returns it and the next replacement's delay."""
        while True:
            await asyncio.sleep(delay)
            # Doubled before the attempt: it counts for this attempt's failure, and for the next
            # exit if the attempt succeeds.
            delay = min(2 * delay, _LONGEST_DELAY)
            try:
                worker = await self._start_worker(number)
            except (WorkerFailed, OSError) as err:
                log.error("%s: next attempt in %.3gs", err, delay)
                continue
            # It missed the reloads and the drain that were sent to the others while it started.
            worker.send_signal(signal.SIGHUP)
            if self.draining:
                await _drain(worker, endpoints.DRAIN, _GRACE_SECONDS)
            return worker, delay


async def _drain(worker: WorkerProcess, path: str, seconds: float) -> None:
    try:
        await worker.request(path, method="POST", seconds=seconds)
    except WorkerSilent as err:
        log.warning("worker not drained: %s", err)
