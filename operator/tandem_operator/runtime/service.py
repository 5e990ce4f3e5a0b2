"""One replica, from start to end: CRDs there? → ports → lease → `acting` → release."""

import asyncio
import logging
import signal
import socket
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tandem_contract.commandline import HostPort
from tandem_kube.client import Api
from tandem_kube.pages import health_app, listening, metrics_app

from .acting import Acting, Scope
from .handlers import quieten
from .installed import check_crds
from .leader import Leadership, LeaseLock, LeaseTimes
from .metrics import Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What the flags say."""

    scope: Scope
    health: HostPort
    metrics: HostPort
    leader_elect: bool
    """False: this process is the only one."""
    lease_namespace: str | None
    """None: the pod's own, or the kubeconfig's."""
    lease_times: LeaseTimes


class LostLease(Exception):
    """Another replica acts now, or soon will: this one has stopped writing."""


class Service:
    """One replica of the operator."""

    def __init__(self, settings: Settings, api: Api, metrics: Metrics) -> None:
        self._settings = settings
        self._api = api
        self._metrics = metrics
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT.

        Raises CrdsMissing, ApiError when the API server cannot be asked at the start, OSError when
        a port is taken, LostLease.
        """
        quieten()
        self._catch_signals()
        for line in await check_crds(self._api):
            log.warning("%s", line)
        settings = self._settings
        async with AsyncExitStack() as stack:
            # Probes and scrapes answer until the end: so they are closed last.
            health, metrics = health_app(self._ready), metrics_app(self._metrics.registry)
            await stack.enter_async_context(listening(health, settings.health, "--health"))
            await stack.enter_async_context(listening(metrics, settings.metrics, "--metrics"))
            lost = asyncio.Event()
            if settings.leader_elect:
                leadership = _leadership(self._api, settings)
                await stack.enter_async_context(leadership)
                await _either(leadership.gained, self._stopping)
                lost = leadership.lost
            if not self._stopping.is_set():
                await self._act(lost)

    async def _act(self, lost: asyncio.Event) -> None:
        self._metrics.leader.set(1)
        log.info("acting for %s", ", ".join(self._settings.scope.namespaces) or "all namespaces")
        acting = await Acting.begin(self._api, self._settings.scope, self._metrics)
        run = asyncio.create_task(acting.run(self._stopping, self._catch_signals))
        losing = asyncio.create_task(lost.wait())
        await asyncio.wait([run, losing], return_when=asyncio.FIRST_COMPLETED)
        losing.cancel()
        if lost.is_set():
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            raise LostLease("the lease could not be renewed in time: another replica may act")
        await run

    def _ready(self) -> bool:
        """A follower is ready: it is there to take over."""
        return not self._stopping.is_set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)


def _leadership(api: Api, settings: Settings) -> Leadership:
    # The pod's name in a cluster; a restarted container must not pass for the one before it.
    identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    lock = LeaseLock(api, settings.lease_namespace or api.namespace, identity)
    return Leadership(lock, settings.lease_times)


async def _either(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
