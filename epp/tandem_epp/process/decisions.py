"""What decides where requests go: fleet, picker, scraper and indexes, without a server.

`Decisions` belongs to one event loop. `service` adds the servers that Envoy calls; the router calls
the picker itself.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from random import Random
from time import time

from tandem_contract.api_paths import ApiPaths
from tandem_contract.otlp import is_wanted
from tandem_contract.server_tls import mutual_client

from ..backends.fleet import Fleet
from ..backends.pods import DiscoveredBackend
from ..backends.precise import PreciseCollector, PrecisePrefixes
from ..backends.scrape import Scraper
from ..backends.scrape_settings import ScrapeSettings
from ..backends.warmup import WarmUps
from ..backends.warmup_requests import SidecarHandOffs
from ..choice.routing import Routing
from ..flow.control import FlowController
from ..flow.metrics import FlowMetrics
from ..llmd.metrics.flow import add_flow_metrics
from ..llmd.metrics.pool import pool_of
from ..llmd.metrics.requests import add_llmd_metrics
from ..metrics.counters import Metrics
from ..placement.history import History
from ..placement.picker import EndpointPicker
from ..placement.preparer import Preparer
from ..placement.refusals import Refusals
from ..prefix.kv_events.settings import EventSettings
from ..replicas.peers.channel import PeerChannel, PeerSettings
from ..replicas.peers.metrics import PeerMetrics
from ..replicas.shared_fleet import SharedFleet
from ..settings import Settings
from .configuration import Configuration

_log = logging.getLogger(__name__)


class Decisions:
    """Builds these components, and applies a new configuration to them."""

    def __init__(
        self, settings: Settings, configuration: Configuration, plan_keys: dict[str, bytes]
    ) -> None:
        """Raises OSError when the files of `--mutual-tls` cannot be used."""
        self._settings = settings
        self.configuration = configuration
        self.fleet = Fleet()
        self.metrics = Metrics(self.fleet)
        self.history = History(settings.history)
        add_llmd_metrics(self.metrics.registry, self.history, self.fleet, pool_of(settings))
        self.picker = EndpointPicker(
            self.fleet, self._routing(), self.metrics, self.history, Random()
        )
        self.flow = FlowController(
            self.fleet,
            FlowMetrics(self.metrics.registry),
            self.metrics.faults,
            refuse=Refusals(self.metrics).error,
            outlook=self.picker.outlook,
            priority=lambda request: self.picker.objectives.priority(request.headers),
            tenant=lambda request: self.picker.objectives.tenant(request.headers),
            random=Random(),
        )
        waiting = self.flow.elsewhere.own
        add_flow_metrics(self.metrics.registry, waiting, pool_of(settings))
        self.picker.follows_hints = settings.subset_hints
        self.picker.plan_keys = plan_keys
        self.picker.salts.header = configuration.router.cache_salt.from_header
        directory = settings.mutual_tls
        self.mutual_tls = mutual_client(directory) if directory is not None else None
        """TLS for calls to sidecars; None: as the configuration says."""
        self.warm_up_keys: Callable[[], Mapping[str, bytes]] | None = None
        """Returns the keys that sign plans of warm-ups; None: those of the picker."""
        self._sidecars = SidecarHandOffs(self._sidecar_keys)
        self.warm_ups = WarmUps(
            self.fleet,
            lambda result: self.metrics.warm_ups.child(result).inc(),
            self._sidecars,
            self._is_warm_up_enabled,
        )
        self.scraper = Scraper(self.fleet, self.warm_ups.on_backend_up)
        self.precise = PrecisePrefixes(self.fleet, self.metrics.observe_tokenization)
        self.metrics.registry.register(PreciseCollector(self.precise))

    def preparer(self) -> Preparer:
        """What prepares requests for the picker."""
        return Preparer(
            self.precise,
            self.picker.rewrites,
            self.metrics.faults,
            self.flow,
            self.picker.placed_body,
        )

    def start_tracing(self, stack: AsyncExitStack, service_name: str = "tandem-epp") -> None:
        """Export a span for each decision, if the settings or the environment name a collector.

        `stack` sends the last ones. `service_name`: what the spans say of their process.
        """
        url = self._settings.otlp_endpoint
        if self._settings.tracing and is_wanted(url, os.environ):
            # Imported only here: the SDK costs memory and start time.
            from .spans import OtlpTracer  # noqa: PLC0415

            tracer = OtlpTracer(url, service_name)
            stack.push_async_callback(tracer.close)
            self.picker.tracer = tracer

    def close_with(self, stack: AsyncExitStack) -> None:
        """Stop what runs in the background when `stack` is closed."""
        stack.push_async_callback(self.warm_ups.close)
        stack.push_async_callback(self.precise.close)
        stack.push_async_callback(self.scraper.close)

    def apply(self, backends: Sequence[DiscoveredBackend]) -> None:
        """Use the current configuration, and `backends` as the fleet."""
        routing = self.configuration.routing
        index = routing.scheduling.index
        offloading = self.configuration.router.kv_cache_index.storage_offloading
        stores = self.fleet.stores
        flow = self.configuration.router.flow_control
        self.fleet.expected_models = frozenset(flow.models if flow.enabled else ())
        stores.is_enabled = offloading.enabled
        stores.default = self.configuration.router.disaggregated_serving.default_external_storage
        # The fleet first: the scraper starts one task for each of its pods.
        self.fleet.apply(backends, index.block_tokens, index.capacity_blocks, time())
        self.fleet.prefixes.limit_bytes = index.limit_bytes
        # Replaced as a whole, between two picks: a pick never sees half of a new configuration.
        self.picker.routing = self._routing()
        self.flow.settings = routing.scheduling.flow
        self.picker.objectives.clients = {client.name: client for client in flow.clients}
        self.fleet.objectives = routing.scheduling.objectives
        self.picker.salts.header = self.configuration.router.cache_salt.from_header
        events = routing.scheduling.events
        if offloading.enabled and events is None:
            # What stores have is told by the same events.
            events = EventSettings()
        stored_bytes = offloading.max_bytes if offloading.enabled else 0
        self.precise.apply(events, routing.scheduling.tokenizers, stored_bytes)
        self._use_tls(routing.scheduling.scraping)
        self.scraper.checks = self.configuration.router.health_checks
        self.scraper.sync()

    def load_mutual_tls(self) -> None:
        """Call sidecars with the current files of `--mutual-tls`; if they cannot be used, as
        before."""
        directory = self._settings.mutual_tls
        if directory is None:
            return
        try:
            self.mutual_tls = mutual_client(directory)
        except OSError as err:
            _log.error("%s: not reloaded, the last certificate stays: %s", directory, err)
            return
        self._use_tls(self.scraper.settings)

    def _use_tls(self, scraping: ScrapeSettings) -> None:
        """Read metrics by `scraping`, and sidecars by `--mutual-tls` where it is given."""
        self.scraper.settings = replace(scraping, sidecars_tls=self.mutual_tls)
        self._sidecars.tls = self.mutual_tls or scraping.tls

    def _sidecar_keys(self) -> Mapping[str, bytes]:
        return self.picker.plan_keys if self.warm_up_keys is None else self.warm_up_keys()

    def _routing(self) -> Routing:
        """The configuration's routing, with the paths that flags add."""
        routing = self.configuration.routing
        paths = (*routing.api.added, *self._settings.api_path)
        return replace(routing, api=ApiPaths(paths))

    def _is_warm_up_enabled(self) -> bool:
        routing = self.configuration.routing
        can_split = routing.serving.enabled and routing.scheduling.can_split
        return self._settings.warm_up and can_split


@dataclass(frozen=True)
class Sharing:
    """What replicas share, and how."""

    fleet: SharedFleet
    channel: PeerChannel


def share(decisions: Decisions, settings: PeerSettings, keys: Mapping[str, bytes]) -> Sharing:
    """Have `decisions` tell the replicas of `settings` what they place, and learn what those do.

    `keys`: by which replicas authenticate each other. Nothing listens yet.
    """
    registry = decisions.metrics.registry
    shared = SharedFleet(decisions.fleet, waiting=decisions.flow.elsewhere)
    channel = PeerChannel(settings, shared, PeerMetrics(registry))
    channel.use_keys(keys)
    # Without peers too: it tells which entries of an access log count.
    decisions.picker.observer = shared
    if settings.peers:
        shared.publisher = channel
    return Sharing(shared, channel)
