"""One container: its process, its probes, its restarts.

    start ─► running ─startup probe─► started ─readiness probe─► ready
               ▲                                                   │
               └──── backoff ◄──── process ended or liveness failed ┘

Until a container is ready, its probes run every `FAST_PERIOD`, so that start-up takes no longer
than it must; from then on they run as often as the Pod says. `initialDelaySeconds` therefore
delays the liveness probe only.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp

from .pod_spec import ContainerSpec, Exec, Handler, HttpGet, Probe, Sleep, TcpSocket
from .process import Process

logger = logging.getLogger(__name__)

FAST_PERIOD: Final = 0.2
"""Seconds between probes of a container that is not ready yet."""
FIRST_BACKOFF: Final = 0.5
"""Seconds before the first restart; doubled with each further restart up to `MAX_BACKOFF`."""
MAX_BACKOFF: Final = 10.0
CANNOT_RUN: Final = 126
"""Exit code of a command that could not be started, as in shells."""


class Container:
    """Runs one container until stopped. Calls `on_change` after each change of its public state."""

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        env: Mapping[str, str],
        log: Path,
        http: aiohttp.ClientSession,
        on_change: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.log = log
        self.started = False
        """The startup probe has succeeded for the current process."""
        self.ready = False
        self.restarts = 0
        self.exit_code: int | None = None
        """Exit code of the last process that ended; None if none has ended."""
        self.reason = ""
        """Why the runner killed the process or could not start it; empty if it did neither."""
        self._env = env
        self._handlers = HandlerRunner(http, env, log)
        self._on_change = on_change
        self._process: Process | None = None
        # Set before the process is asked to end, so that _run does not restart it.
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process group of the running command; None between restarts and after the end."""
        return self._process.pid if self._process else None

    @property
    def is_finished(self) -> bool:
        """Whether the container has ended and will not run again."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Start the container in the background."""
        self._task = asyncio.create_task(self._run(), name=f"container {self.spec.name}")

    async def wait(self) -> int:
        """Wait until the container has ended for good; returns its exit code."""
        if self._task is not None:
            await self._task
        return self.exit_code or 0

    async def pre_stop(self, grace: float) -> None:
        """Run the preStop hook for up to `grace` seconds.

        Logs a failure if the container has started.
        """
        hook = self.spec.pre_stop
        # The kubelet also skips the hook of a container that does not run.
        if hook is None or self._process is None:
            return
        # Before the hook, which may make the process end by itself.
        self._stopping = True
        was_started = self.started
        # The hook of an engine that still loads fails, because it does not listen yet: nothing that
        # a user who presses Ctrl-C should read.
        if not await self._handlers.run(hook, grace) and was_started:
            logger.warning(
                "container %s: preStop hook failed or took longer than %.0f s",
                *(self.spec.name, grace),
            )

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds; returns when no process is left."""
        self._stopping = True
        if self._task is None:
            return
        if self._process is None:
            # Between restarts, or not started yet: there is only a task to cancel.
            self._task.cancel()
        else:
            self._process.terminate()
        _, pending = await asyncio.wait([self._task], timeout=grace)
        # Read again: the process may have ended, or the task may have been cancelled, meanwhile.
        if pending and self._process is not None:
            self._process.kill()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            self.exit_code = await self._run_once()
            self._on_change()
            if self._stopping or not self.spec.restarts:
                return
            logger.warning(
                "container %s exited with code %d; restarting in %.1f s; log: %s",
                *(self.spec.name, self.exit_code, backoff, self.log),
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)
            self.restarts += 1

    async def _run_once(self) -> int:
        """Run the command once with its probes; returns the exit code."""
        spec = self.spec
        try:
            process = await Process.start(
                spec.command, env=self._env, cwd=spec.working_dir, log=self.log
            )
        except OSError as err:
            self.reason = f"{err.filename or spec.command[0]}: {err.strerror}"
            return CANNOT_RUN
        self._process = process
        probing = asyncio.create_task(self._probe(process), name=f"probes of {spec.name}")
        try:
            return await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        finally:
            # Probes belong to this process: they must end before the next process starts, or they
            # could mark it ready or kill it.
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing
            self._process = None
            self.started = self.ready = False

    async def _probe(self, process: Process) -> None:
        """Run the startup probe, then readiness and liveness probes until cancelled."""
        # Until the startup probe succeeds no other probe runs, or liveness would kill a container
        # that is still loading.
        if self.spec.startup and not await self._startup_succeeds(self.spec.startup):
            self._kill(process, "its startup probe failed")
            return
        self.started = True
        self._on_change()
        # Readiness and liveness run side by side: a slow readiness probe must not delay a liveness
        # one.
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_readiness(self.spec.readiness))
            if self.spec.liveness:
                group.create_task(self._watch_liveness(self.spec.liveness, process))

    async def _startup_succeeds(self, probe: Probe) -> bool:
        """Whether the probe succeeds within the time that Kubernetes would allow."""
        # A probe that takes longer than the period delays the next one.
        attempt = max(probe.period, probe.timeout)
        allowed = probe.initial_delay + probe.failure_threshold * attempt
        with suppress(TimeoutError):
            async with asyncio.timeout(allowed):
                while True:
                    if await self._handlers.run(probe.handler, probe.timeout):
                        return True
                    await asyncio.sleep(FAST_PERIOD)
        return False

    async def _watch_readiness(self, probe: Probe | None) -> None:
        if probe is None:
            # As in Kubernetes: a container without a readiness probe is ready once it has started.
            self._set_ready(True)
            return
        successes = failures = 0
        while True:
            if await self._handlers.run(probe.handler, probe.timeout):
                successes, failures = successes + 1, 0
            else:
                successes, failures = 0, failures + 1
            if successes >= probe.success_threshold:
                self._set_ready(True)
            elif failures >= probe.failure_threshold:
                self._set_ready(False)
            # Once ready, probe as Kubernetes would; before that, fast.
            await asyncio.sleep(probe.period if self.ready else min(probe.period, FAST_PERIOD))

    async def _watch_liveness(self, probe: Probe, process: Process) -> None:
        await asyncio.sleep(probe.initial_delay)
        failures = 0
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period)
            succeeded = await self._handlers.run(probe.handler, probe.timeout)
            failures = 0 if succeeded else failures + 1
        self._kill(process, "its liveness probe failed")

    def _kill(self, process: Process, reason: str) -> None:
        """Kill the process group; `_run` then restarts the container if its pod allows that."""
        logger.warning("container %s: killed: %s", self.spec.name, reason)
        self.reason = reason
        process.kill()

    def _set_ready(self, ready: bool) -> None:
        if self.ready != ready:
            self.ready = ready
            self._on_change()


class HandlerRunner:
    """Runs a probe or lifecycle handler once, with one container's environment and log file."""

    def __init__(self, http: aiohttp.ClientSession, env: Mapping[str, str], log: Path) -> None:
        self._http = http
        self._env = env
        self._log = log

    async def run(self, handler: Handler, timeout: float) -> bool:
        """Whether `handler` succeeded within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await self._run(handler)
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _run(self, handler: Handler) -> bool:
        match handler:
            case HttpGet():
                return await self._http_get(handler)
            case TcpSocket(host, port):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
            case Exec(command):
                return await self._exec(command)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
                return True

    async def _http_get(self, handler: HttpGet) -> bool:
        url = f"{handler.scheme}://{handler.host}:{handler.port}{handler.path}"
        # The kubelet does not verify the certificate of a probed server either.
        async with self._http.get(
            url, headers=handler.headers, ssl=False, allow_redirects=False
        ) as response:
            # A redirect counts as success and is not followed: it may lead to another host.
            return 200 <= response.status < 400

    async def _exec(self, command: tuple[str, ...]) -> bool:
        process = await Process.start(command, env=self._env, cwd=None, log=self._log)
        try:
            return await process.wait() == 0
        except asyncio.CancelledError:
            # The timeout cancels this task: the command must not keep running beside the container.
            process.kill()
            await process.wait()
            raise
