"""The running picker: fleet, scraper, servers and watches, from start to SIGTERM."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tandem_contract.commandline import HostPort

from .admin import health_app, listening, metrics_app
from .discovery import Loaded, Watch, reload, reload_keys
from .grpc_server import GrpcServer
from .metrics import Metrics
from .picker import EndpointPicker
from .pods import Fleet
from .scrape import Scraper

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


class Service:
    """The parts, and how a new configuration reaches them."""

    def __init__(self, settings: Settings, loaded: Loaded, keys: dict[str, bytes]) -> None:
        self._settings = settings
        self._fleet = Fleet()
        self._scraper = Scraper(self._fleet)
        self._metrics = Metrics(self._fleet)
        self._picker = EndpointPicker(self._fleet, loaded.routing, self._metrics, Random())
        self._picker.plan_keys = keys
        self._stopping = asyncio.Event()
        self._loaded = loaded

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises OSError, with nothing left running, when a port is taken.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        async with AsyncExitStack() as stack:
            # Probes and scrapes answer until the last stream has ended: so they are closed last.
            health, metrics = health_app(self._ready), metrics_app(self._metrics.registry)
            await stack.enter_async_context(listening(health, settings.health, "--health"))
            await stack.enter_async_context(listening(metrics, settings.metrics, "--metrics"))
            server = GrpcServer(self._picker, settings.listen, settings.max_body)
            await server.start()
            stack.push_async_callback(server.stop, GRACE)
            stack.push_async_callback(self._scraper.close)
            self._apply(self._loaded)
            tasks = [asyncio.create_task(watch.run()) for watch in self._watches()]
            await self._stopping.wait()
            for task in tasks:
                task.cancel()

    def _ready(self) -> bool:
        return self._scraper.complete and not self._stopping.is_set()

    def _apply(self, new: Loaded) -> None:
        index = new.routing.scheduling.index
        self._fleet.apply(new.config.backends, index.blockSizeTokens, index.lruCapacityPerServer)
        self._picker.routing = new.routing
        self._scraper.follow()

    def _watches(self) -> list[Watch]:
        watches = [Watch(self._settings.config, self._config_changed)]
        if self._settings.plan_key_dir is not None:
            watches.append(Watch(self._settings.plan_key_dir, self._keys_changed))
        return watches

    def _config_changed(self) -> None:
        if (new := reload(self._settings.config, os.environ)) is not None:
            self._apply(new)

    def _keys_changed(self) -> None:
        directory = self._settings.plan_key_dir
        if directory is not None and (keys := reload_keys(directory)) is not None:
            self._picker.plan_keys = keys


async def serve(settings: Settings, loaded: Loaded, keys: dict[str, bytes]) -> None:
    """Run the picker until it is told to stop. Raises OSError if a port is taken."""
    await Service(settings, loaded, keys).run()
