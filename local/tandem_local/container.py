"""One container: its process, its probes, its restarts.

    start ─► running ─startup probe─► started ─readiness probe─► ready
               ▲                                                   │
               └──────── backoff ◄──────── ended, or not alive ◄───┘

Probes are asked every `FAST_PERIOD` until the container is ready (a person is waiting), then as
the Pod says. `initialDelaySeconds` therefore delays liveness only.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp

from .podspec import ContainerSpec, Probe
from .probes import Asker
from .process import Process

logger = logging.getLogger(__name__)

FAST_PERIOD: Final = 0.2
"""Seconds between probes of a container that is not ready yet."""
FIRST_BACKOFF: Final = 0.5
"""Seconds before the first restart; doubled by each further one, up to `LONGEST_BACKOFF`."""
LONGEST_BACKOFF: Final = 10.0
CANNOT_RUN: Final = 126
"""Exit code of a command that could not be started, as shells have it."""


class Container:
    """Runs one container until stopped; `changed` is called whenever what can be seen changes."""

    def __init__(
        self,
        spec: ContainerSpec,
        *,
        env: Mapping[str, str],
        log: Path,
        http: aiohttp.ClientSession,
        changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.log = log
        self.started = False
        self.ready = False
        self.restarts = 0
        self.exit_code: int | None = None
        """Of the last process that ended; None while none has."""
        self.reason = ""
        """Why the runner ended it, when it did."""
        self._env = env
        self._asker = Asker(http, env, log)
        self._changed = changed
        self._process: Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process group of the running command; None between restarts and after the end."""
        return self._process.pid if self._process else None

    @property
    def done(self) -> bool:
        """Whether it ended and will not run again."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Begin to run it."""
        self._task = asyncio.create_task(self._run(), name=f"container {self.spec.name}")

    async def wait(self) -> int:
        """Its exit code once it will not run again."""
        if self._task is not None:
            await self._task
        return self.exit_code or 0

    async def pre_stop(self, grace: float) -> None:
        """Run the preStop hook for up to `grace` seconds; a failing one is logged."""
        hook = self.spec.pre_stop
        if hook is None or self._process is None:
            return
        self._stopping = True
        if not await self._asker.ask(hook, grace):
            logger.warning("%s: preStop failed or took more than %.0f s", self.spec.name, grace)

    async def stop(self, grace: float) -> None:
        """SIGTERM, SIGKILL after `grace` seconds; returns when nothing of it is left."""
        self._stopping = True
        if self._task is None:
            return
        if self._process is None:
            self._task.cancel()
        else:
            self._process.terminate()
        _, running = await asyncio.wait([self._task], timeout=grace)
        if running and self._process is not None:
            self._process.kill()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            self.exit_code = await self._run_once()
            self._changed()
            if self._stopping or not self.spec.restarts:
                return
            logger.warning(
                "%s ended with %d: again in %.1f s; log: %s",
                *(self.spec.name, self.exit_code, backoff, self.log),
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            self.restarts += 1

    async def _run_once(self) -> int:
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
            probing.cancel()
            with suppress(asyncio.CancelledError):
                await probing
            self._process = None
            self.started = self.ready = False

    async def _probe(self, process: Process) -> None:
        if self.spec.startup and not await self._starts(self.spec.startup):
            self._end(process, "its startup probe failed")
            return
        self.started = True
        self._changed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_readiness(self.spec.readiness))
            if self.spec.liveness:
                group.create_task(self._watch_liveness(self.spec.liveness, process))

    async def _starts(self, probe: Probe) -> bool:
        """Whether it succeeds in the time Kubernetes would give it."""
        allowed = probe.initial_delay + probe.failure_threshold * probe.period
        with suppress(TimeoutError):
            async with asyncio.timeout(allowed):
                while True:
                    if await self._asker.ask(probe.handler, probe.timeout):
                        return True
                    await asyncio.sleep(FAST_PERIOD)
        return False

    async def _watch_readiness(self, probe: Probe | None) -> None:
        if probe is None:
            self._set_ready(True)
            return
        successes = failures = 0
        while True:
            if await self._asker.ask(probe.handler, probe.timeout):
                successes, failures = successes + 1, 0
            else:
                successes, failures = 0, failures + 1
            if successes >= probe.success_threshold:
                self._set_ready(True)
            elif failures >= probe.failure_threshold:
                self._set_ready(False)
            await asyncio.sleep(probe.period if self.ready else min(probe.period, FAST_PERIOD))

    async def _watch_liveness(self, probe: Probe, process: Process) -> None:
        await asyncio.sleep(probe.initial_delay)
        failures = 0
        while failures < probe.failure_threshold:
            await asyncio.sleep(probe.period)
            failures = 0 if await self._asker.ask(probe.handler, probe.timeout) else failures + 1
        self._end(process, "its liveness probe failed")

    def _end(self, process: Process, reason: str) -> None:
        logger.warning("%s: killed: %s", self.spec.name, reason)
        self.reason = reason
        process.kill()

    def _set_ready(self, ready: bool) -> None:
        if self.ready != ready:
            self.ready = ready
            self._changed()
