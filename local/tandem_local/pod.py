"""One pod: start order, readiness, stop order, and replacement when it has ended.

Init containers run first, in order. One with `restartPolicy: Always` is a sidecar: the next
container starts once the sidecar has started, and the sidecar stops after the pod's other
containers. To stop a pod, the runner runs every preStop hook, sends SIGTERM, and sends SIGKILL
when the grace period is over.

A pod has ended when an init container failed, or a container ended that is not restarted in place.
The runner then replaces the pod as the operator would: same name and address, new uid, empty
volumes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from .container import FIRST_BACKOFF, MAX_BACKOFF, Container
from .errors import SetupError
from .pod_spec import PodSpec

logger = logging.getLogger(__name__)


class ChangeSignal:
    """Wakes the tasks that wait for a change of any pod's state."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._event.set()
        # A new event for later waiters: tasks that wait now hold the old one.
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._event.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; it is evaluated now and after every change."""
        while not condition():
            await self.wait()


class PodInstance:
    """The containers of one pod, from its start to its end; a replacement is a new instance."""

    def __init__(
        self, spec: PodSpec, init: Sequence[tuple[Container, bool]], containers: Sequence[Container]
    ) -> None:
        """`init`: in order, each with whether it is a sidecar."""
        self.spec = spec
        self.sidecars = tuple(container for container, is_sidecar in init if is_sidecar)
        self.containers = tuple(containers)
        self.all_containers = (*(container for container, _ in init), *containers)
        self._init = init

    def ended_container(self, *, finally_ended: bool) -> Container | None:
        """A container that ended although it should run, or an init container that failed.

        With `finally_ended`, only one that will not be restarted: the pod has ended.
        """
        for container, is_sidecar in self._init:
            # An init container that ended with 0 did its work.
            # A sidecar restarts in place, so its failure does not end the pod.
            if container.exit_code and not (is_sidecar and finally_ended):
                return container
        for container in self.containers:
            if container.exit_code is not None and (container.is_finished or not finally_ended):
                return container
        return None

    async def start(self, changes: ChangeSignal) -> None:
        """Start the containers in order; returns when all are started or an init one has failed."""
        for container, is_sidecar in self._init:
            container.start()
            if is_sidecar:
                # Only started, not ready: a sidecar may become ready only after the containers that
                # follow.
                await changes.wait_until(partial(_has_started, container))
            elif await container.wait() != 0:
                return
        for container in self.containers:
            container.start()

    async def stop(self, grace: float) -> None:
        """Stop all containers within about `grace` seconds; may be called again."""
        deadline = time.monotonic() + grace

        def remaining() -> float:
            return max(0.0, deadline - time.monotonic())

        # All hooks end before the first SIGTERM, since a hook of one container may call another
        # container. As in Kubernetes, the hooks' time counts towards the grace period.
        await asyncio.gather(*(container.pre_stop(grace) for container in self.all_containers))
        await asyncio.gather(*(container.stop(remaining()) for container in self.containers))
        # Sidecars last and in reverse order: a container may need the sidecars started before it.
        for container, _ in reversed(self._init):
            await container.stop(remaining())


def _has_started(container: Container) -> bool:
    return container.started


class RunningPod:
    """A pod that is kept running, by replacing it when it ends, until `stop`."""

    def __init__(
        self, build: Callable[[], PodInstance], changes: ChangeSignal, stop_timeout: float
    ) -> None:
        """`build` makes the next instance; `stop_timeout` (seconds) limits the grace period of
        `stop`."""
        self._build = build
        self._changes = changes
        self._stop_timeout = stop_timeout
        # Built at once, so that an invalid pod raises SetupError before any pod starts.
        self._instance = build()
        self._replacements = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def spec(self) -> PodSpec:
        """Spec of the current instance; name, address and labels never change."""
        return self._instance.spec

    @property
    def containers(self) -> tuple[Container, ...]:
        """The long-running containers, sidecars first; without init containers that end."""
        return (*self._instance.sidecars, *self._instance.containers)

    @property
    def ready(self) -> bool:
        """Whether every long-running container is ready."""
        return all(container.ready for container in self.containers)

    @property
    def restarts(self) -> int:
        """Replacements of the pod plus restarts of the current instance's containers."""
        return self._replacements + sum(container.restarts for container in self.containers)

    @property
    def pids(self) -> dict[str, int]:
        """Container → process group, of the containers that run now."""
        return {c.spec.name: c.pid for c in self._instance.all_containers if c.pid is not None}

    def failed_container(self) -> Container | None:
        """A container that ended although it should run, whether it is restarted or not."""
        return self._instance.ended_container(finally_ended=False)

    def start(self) -> None:
        """Start the pod in the background."""
        self._task = asyncio.create_task(self._run(), name=f"pod {self.spec.name}")

    async def stop(self) -> None:
        """Stop the pod; returns when none of its processes is left."""
        # Cancel first: _run must not replace the pod while its containers are stopped.
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._instance.stop(min(self.spec.grace, self._stop_timeout))

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            await self._instance.start(self._changes)
            # No await between the check and the wait, so no change is missed.
            while (ended := self._instance.ended_container(finally_ended=True)) is None:
                await self._changes.wait()
            logger.warning(
                "pod %s: container %s exited with code %d; replacing the pod %.1f s after its other"
                " containers have ended; log: %s",
                *(self.spec.name, ended.spec.name, ended.exit_code, backoff, ended.log),
            )
            # In the pod's own time: its sidecar moves streams of the dead engine to another one.
            await self._instance.stop(self.spec.grace)
            # Only now: the other containers have released the address and ports that the
            # replacement uses.
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)
            try:
                self._instance = self._build()
            except SetupError as err:
                logger.error("%s: the pod is not replaced", err)
                return
            self._replacements += 1
            self._changes.notify()
