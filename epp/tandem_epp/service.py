"""The running picker: fleet, scraper, servers and watches, from start to SIGTERM.

Errors: OSError when a port is taken, `tandem_kube.errors.NotConfigured` when the pods are to come
from a cluster and there is none to talk to.
"""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import time
from typing import TYPE_CHECKING, Final

from tandem_contract.commandline import HostPort
from tandem_contract.otlp import is_wanted
from tandem_kube.pages import health_app, listening, metrics_app

from .backends.fleet import Fleet
from .backends.pod_backend import PodSelection
from .backends.pods import Member
from .backends.scrape import Scraper
from .backends.warmup import WarmUps
from .configuration import Loaded, Watch, reload, reload_keys
from .ext_proc.grpc_server import GrpcServer
from .history import History, route
from .metrics import Metrics
from .picker import EndpointPicker

if TYPE_CHECKING:
    from .backends.kubernetes_discovery import ClusterPods

GRACE: Final = 2.0
"""Seconds for open streams at the end. Their requests are placed; Envoy finishes them alone."""


@dataclass(frozen=True)
class Settings:
    """What the flags say."""

    listen: HostPort
    health: HostPort
    metrics: HostPort
    config: Path
    plan_key_dir: Path | None
    max_body: int
    """Bytes."""
    history: int
    """Decisions kept for `tandem trace`."""
    otlp_endpoint: str
    """URL that takes spans; empty: OpenTelemetry's environment says."""
    warm_up: bool
    """Whether pairs of pods make their first hand-off before a request needs it."""
    pods: PodSelection | None = None
    """Where backends come from; None: the configuration file."""


class Service:
    """The parts, and how a new configuration reaches them."""

    def __init__(self, settings: Settings, loaded: Loaded, keys: dict[str, bytes]) -> None:
        self._settings = settings
        self._fleet = Fleet()
        self._metrics = Metrics(self._fleet)
        self._history = History(settings.history)
        self._picker = EndpointPicker(
            self._fleet, loaded.routing, self._metrics, self._history, Random()
        )
        self._picker.plan_keys = keys
        self._warmups = WarmUps(
            self._fleet, self._metrics, lambda: self._picker.plan_keys, self._warms_up
        )
        self._scraper = Scraper(self._fleet, self._warmups.met)
        self._stopping = asyncio.Event()
        self._loaded = loaded
        self._cluster: ClusterPods | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; raises as the module says, with nothing left running."""
        settings, loop = self._settings, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            if settings.pods is not None:
                self._cluster = await self._connect(settings.pods, stack)
            # Probes and scrapes answer until the last stream has ended: so they are closed last.
            health, metrics = health_app(self._ready), metrics_app(self._metrics.registry)
            metrics.add_routes([route(self._history)])
            await stack.enter_async_context(listening(health, settings.health, "--health"))
            await stack.enter_async_context(listening(metrics, settings.metrics, "--metrics"))
            self._trace(stack)
            server = GrpcServer(self._picker, settings.listen, settings.max_body)
            await server.start()
            stack.push_async_callback(server.stop, GRACE)
            stack.push_async_callback(self._warmups.close)
            stack.push_async_callback(self._scraper.close)
            await self._until_stopped()

    def _trace(self, stack: AsyncExitStack) -> None:
        flag = self._settings.otlp_endpoint
        if is_wanted(flag, os.environ):
            # Only here: the SDK costs memory and start time.
            from .spans import Tracer  # noqa: PLC0415

            tracer = Tracer(flag)
            stack.push_async_callback(tracer.close)
            self._picker.spans = tracer

    async def _until_stopped(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(watch.run()) for watch in self._watches()]
            if self._cluster is not None:
                running.append(tasks.create_task(self._cluster.run()))
                running.append(tasks.create_task(self._first_pods(self._cluster)))
            else:
                self._apply()
            await self._stopping.wait()
            for task in running:
                task.cancel()

    async def _connect(self, pods: PodSelection, stack: AsyncExitStack) -> "ClusterPods":
        # Only here: the API's client costs memory that static discovery has no use for.
        from tandem_kube.client import connect  # noqa: PLC0415

        from .backends.kubernetes_discovery import ClusterPods  # noqa: PLC0415

        api = await stack.enter_async_context(await connect())
        cluster = ClusterPods(api, pods, self._apply)
        self._metrics.registry.register(cluster)
        return cluster

    async def _first_pods(self, cluster: "ClusterPods") -> None:
        """Also when there are none, of which no change tells."""
        await cluster.synced.wait()
        self._apply()

    def _ready(self) -> bool:
        return self._scraper.complete and not self._stopping.is_set()

    def _warms_up(self) -> bool:
        routing = self._loaded.routing
        splits = routing.serving.enabled and routing.scheduling.rules.split
        return self._settings.warm_up and splits

    def _apply(self) -> None:
        """Have the backends and the settings that are in force now."""
        loaded, index = self._loaded, self._loaded.routing.scheduling.index
        self._fleet.apply(
            self._members(), index.blockSizeTokens, index.lruCapacityPerServer, time()
        )
        self._picker.routing = loaded.routing
        self._scraper.follow()

    def _members(self) -> list[Member]:
        if self._cluster is not None:
            return self._cluster.members
        return [Member(backend) for backend in self._loaded.config.backends]

    def _watches(self) -> list[Watch]:
        watches = [Watch(self._settings.config, self._config_changed)]
        if self._settings.plan_key_dir is not None:
            watches.append(Watch(self._settings.plan_key_dir, self._keys_changed))
        return watches

    def _config_changed(self) -> None:
        pods = self._settings.pods
        new = reload(self._settings.config, os.environ, listed=pods is None)
        if new is not None:
            self._loaded = new
            self._apply()
            self._warmups.all_met()

    def _keys_changed(self) -> None:
        directory = self._settings.plan_key_dir
        if directory is not None and (keys := reload_keys(directory)) is not None:
            self._picker.plan_keys = keys


async def serve(settings: Settings, loaded: Loaded, keys: dict[str, bytes]) -> None:
    """Run the picker until it is told to stop. Raises OSError, NotConfigured."""
    await Service(settings, loaded, keys).run()
