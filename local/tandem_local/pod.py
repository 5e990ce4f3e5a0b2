"""One pod: what starts after what, when it is ready, how it ends, and that it comes back.

Init containers run first, in order; one with `restartPolicy: Always` is a sidecar: the next
container starts once it has started, and it ends after the pod's other containers. Ending: every
preStop hook, then SIGTERM, then SIGKILL when the grace period is over.

A pod that is over (an init container failed, or a container that is not restarted in place ended)
is replaced, as the operator would: same name and address, new uid, empty volumes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .container import FIRST_BACKOFF, LONGEST_BACKOFF, Container
from .errors import Refused
from .podspec import PodSpec

logger = logging.getLogger(__name__)


class Changes:
    """Wakes whoever waits for something about the pods to become true."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        """Return at the next change."""
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; it is asked after every change."""
        while not condition():
            await self.next()


class Incarnation:
    """The containers of one pod, from its start to its end."""

    def __init__(
        self, spec: PodSpec, init: Sequence[tuple[Container, bool]], containers: Sequence[Container]
    ) -> None:
        """`init`: in order, each with whether it is a sidecar."""
        self.spec = spec
        self.sidecars = tuple(container for container, sidecar in init if sidecar)
        self.containers = tuple(containers)
        self.everyone = (*(container for container, _ in init), *containers)
        self._init = init

    def ended(self, *, for_good: bool) -> Container | None:
        """A container that ended and should not have; `for_good`: that will not run again."""
        for container, sidecar in self._init:
            if container.exit_code and not (sidecar and for_good):
                return container
        return next(
            (c for c in self.containers if c.exit_code is not None and (c.done or not for_good)),
            None,
        )

    async def start(self, changes: Changes) -> None:
        """Start the containers in order; returns when the last is started or one has failed."""
        for container, sidecar in self._init:
            container.start()
            if sidecar:
                await changes.until(partial(_has_started, container))
            elif await container.wait() != 0:
                return
        for container in self.containers:
            container.start()

    async def stop(self, grace: float) -> None:
        """End all its containers within about `grace` seconds; safe to call again."""
        ends = time.monotonic() + grace

        def left() -> float:
            return max(0.0, ends - time.monotonic())

        await asyncio.gather(*(container.pre_stop(grace) for container in self.everyone))
        await asyncio.gather(*(container.stop(left()) for container in self.containers))
        for container, _ in reversed(self._init):
            await container.stop(left())


def _has_started(container: Container) -> bool:
    return container.started


class RunningPod:
    """A pod that is kept running until stopped."""

    def __init__(
        self, build: Callable[[], Incarnation], changes: Changes, stop_timeout: float
    ) -> None:
        """`build` makes the next incarnation; `stop_timeout` (seconds) bounds the grace period."""
        self._build = build
        self._changes = changes
        self._stop_timeout = stop_timeout
        self._now = build()
        self._replaced = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> PodSpec:
        """As it is resolved now: name, address and labels never change."""
        return self._now.spec

    @property
    def containers(self) -> tuple[Container, ...]:
        """Sidecars first; init containers that end are not among them."""
        return (*self._now.sidecars, *self._now.containers)

    @property
    def ready(self) -> bool:
        """Every container is ready."""
        return all(container.ready for container in self.containers)

    @property
    def restarts(self) -> int:
        """Replacements of the pod and restarts of its containers together."""
        return self._replaced + sum(container.restarts for container in self.containers)

    @property
    def pids(self) -> dict[str, int]:
        """Container → process group of what runs of it now."""
        return {c.spec.name: c.pid for c in self._now.everyone if c.pid is not None}

    def fallen(self) -> Container | None:
        """A container that ended and should not have, restarted or not."""
        return self._now.ended(for_good=False)

    def start(self) -> None:
        """Begin to run it."""
        self._task = asyncio.create_task(self._run(), name=f"pod {self.spec.name}")

    async def stop(self) -> None:
        """End it; returns when none of its processes is left."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._now.stop(min(self.spec.grace, self._stop_timeout))

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            await self._now.start(self._changes)
            while (ended := self._now.ended(for_good=True)) is None:
                await self._changes.next()
            logger.warning(
                "%s/%s ended with %d: a new pod in %.1f s; log: %s",
                *(self.spec.name, ended.spec.name, ended.exit_code, backoff, ended.log),
            )
            await self._now.stop(min(self.spec.grace, self._stop_timeout))
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)
            try:
                self._now = self._build()
            except Refused as err:
                logger.error("%s: it stays away", err)
                return
            self._replaced += 1
            self._changes.notify()
