"""The running EPP: fleet, scraper, servers and file watches, from start to SIGTERM.

Errors: OSError when a port is in use; `tandem_kube.errors.NotConfigured` when backends come from a
cluster and no cluster is configured.
"""

import asyncio
import logging
import os
import signal
from contextlib import AsyncExitStack, suppress
from typing import Final

from tandem_contract.held_bytes import HeldBytes
from tandem_contract.memory_limit import default_held_bytes
from tandem_kube.pages import metrics_app

from ..backends.pods import DiscoveredBackend
from ..metrics.counters import HeldCollector
from ..replicas.peers.channel import PeerSettings
from ..settings import Settings
from .configuration import Configuration, FileWatch, listed_backends, reload, reload_keys
from .decisions import Decisions, share
from .discovery import Discovery, Watch, connect, discover, discover_pool_objects
from .pages import routes
from .servers import Servers

_log: Final = logging.getLogger(__name__)

GRACE: Final = 2.0
"""Seconds that open streams get at shutdown. Their requests are placed: Envoy finishes them without
the EPP."""


class Service:
    """Builds the components, and applies a new configuration to them."""

    def __init__(
        self, settings: Settings, configuration: Configuration, plan_keys: dict[str, bytes]
    ) -> None:
        self._settings = settings
        self._decisions = Decisions(settings, configuration, plan_keys)
        self._fleet, self._picker = self._decisions.fleet, self._decisions.picker
        self._metrics = self._decisions.metrics
        self._held = HeldBytes(
            settings.held_bytes or default_held_bytes(largest_body=settings.max_body)
        )
        self._metrics.registry.register(HeldCollector(self._held))
        self._decisions.flow.limit_bytes(self._held.limit // 2)
        peers = PeerSettings(peers=settings.peers, listen=settings.peer_listen)
        sharing = share(self._decisions, peers, plan_keys)
        self._shared, self._channel = sharing.fleet, sharing.channel
        self.preparer = self._decisions.preparer()
        self._stopping = asyncio.Event()
        self._drained = asyncio.Event()
        """Set by a second signal: it ends the time in which new requests are still answered."""
        self._servers = Servers(settings, self._held, self._is_ready)
        self._discovery: Discovery | None = None
        """None with static discovery."""
        self._pool_objects: tuple[Watch, ...] = ()
        """None without an InferencePool."""

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; nothing runs afterwards. Raises OSError, NotConfigured."""
        loop = asyncio.get_running_loop()
        # First, so that a signal during the start also ends the process in order.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        async with AsyncExitStack() as stack:
            await self._start_pages(stack)
            self._decisions.start_tracing(stack)
            # Before the first request, so that others' placements are known to its decision.
            await stack.enter_async_context(self._channel.running())
            stack.push_async_callback(self.preparer.close)
            server = self._servers.ext_proc(self._picker, self._shared.on_broken)
            server.prepare = self.preparer.prepare
            server.longest_wait = self._decisions.flow.longest_wait
            await server.start()
            # Closed in reverse: first scraper and warm-ups, then the streams that are still open.
            stack.push_async_callback(server.stop, GRACE)
            # Before: those that wait would be cut with their streams.
            stack.push_async_callback(self._decisions.flow.close)
            stack.callback(self._shared.leave)
            self._decisions.close_with(stack)
            await self._run_watches()

    async def _start_pages(self, stack: AsyncExitStack) -> None:
        """Connect to the cluster if it is needed; answer probes and serve the metrics port."""
        settings, registry = self._settings, self._metrics.registry
        needs_cluster = settings.pods is not None or settings.authorize_metrics
        api = await connect(stack) if needs_cluster else None
        if api is not None and settings.pods is not None:
            self._discovery, collector = discover(api, settings.pods, self._apply)
            registry.register(collector)
            if (pool := settings.pool_name) is not None:
                self._pool_objects = discover_pool_objects(
                    api, pool, self._picker.rewrites, self._picker.objectives
                )
        # Entered first, so closed last: probes and metrics answer until the last stream ends.
        await stack.enter_async_context(self._servers.health())
        pages = metrics_app(registry)
        pages.add_routes(routes(self._decisions.history, self._fleet))
        authorizing = api if settings.authorize_metrics else None
        await stack.enter_async_context(self._servers.metrics(pages, authorizing))

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._drained.set()
        self._stopping.set()

    async def _run_watches(self) -> None:
        """Follow files and pods until SIGTERM or SIGINT."""
        # A task that fails cancels the others, and its error ends the process.
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(watch.run()) for watch in self._file_watches()]
            if self._discovery is not None:
                running.append(tasks.create_task(self._discovery.run()))
                running += [tasks.create_task(watch.run()) for watch in self._pool_objects]
            else:
                self._apply()
            await self._stopping.wait()
            # Not ready, but still answering: gateways notice only after a while.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.drain_timeout):
                    await self._drained.wait()
            for task in running:
                task.cancel()

    def _is_ready(self) -> bool:
        # Before the first scrapes, and before it knows what its peers placed, the EPP would route
        # blindly; once it stops it must get no new
        # streams.
        if self._stopping.is_set() or (self._discovery and not self._discovery.is_known):
            return False
        return self._decisions.scraper.is_complete and self._channel.is_informed

    def _apply(self) -> None:
        """Apply the current backends and configuration."""
        self._decisions.apply(self._backends())
        self._channel.open()

    def _backends(self) -> list[DiscoveredBackend]:
        if self._discovery is None:
            return listed_backends(self._decisions.configuration)
        routing = self._decisions.configuration.routing
        backends = self._discovery.backends(routing.serving.domain_label)
        scraping = routing.scheduling.scraping
        by_tls = self._settings.mutual_tls is not None
        return [scraping.with_scheme(backend, to_sidecars=by_tls) for backend in backends]

    def _file_watches(self) -> list[FileWatch]:
        watches, settings = self._servers.watches(), self._settings
        if settings.config is not None:
            watches.append(FileWatch(settings.config, self._reload_configuration))
        if settings.mutual_tls is not None:
            watches.append(FileWatch(settings.mutual_tls, self._decisions.load_mutual_tls))
        if settings.plan_key_dir is not None:
            watches.append(FileWatch(settings.plan_key_dir, self._reload_keys))
        return watches

    def _reload_configuration(self) -> None:
        settings = self._settings
        if settings.config is None:
            return
        new = reload(
            settings.config,
            os.environ,
            lists_backends=settings.lists_backends,
            gates=settings.feature_gates,
        )
        if new is not None:
            self._decisions.configuration = new
            self._apply()
            # Splitting may have been switched on just now.
            self._decisions.warm_ups.warm_all()

    def _reload_keys(self) -> None:
        directory = self._settings.plan_key_dir
        if directory is not None and (keys := reload_keys(directory)) is not None:
            self._picker.plan_keys = keys
            self._channel.use_keys(keys)


async def serve(
    settings: Settings, configuration: Configuration, plan_keys: dict[str, bytes]
) -> None:
    """Run the EPP until SIGTERM or SIGINT. Raises OSError, NotConfigured."""
    await Service(settings, configuration, plan_keys).run()
