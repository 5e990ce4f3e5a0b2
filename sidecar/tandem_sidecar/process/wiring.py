"""Creates the components of one serving process and connects them."""

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from tandem_contract import metrics as names
from tandem_contract import otlp
from tandem_contract.commandline import HostPort
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.memory_limit import default_held_bytes, least_held_bytes
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.server_tls import ServerTls
from tandem_http1.client import Handler
from tandem_http1.reader import HeadCheck
from tandem_http1.server import Server
from tandem_http1.upstream import Pool

from ..connectors import ConnectorOptions, make_connector
from ..connectors.nixl import Nixl
from ..handoff.breaker import Breakers, BreakerState
from ..handoff.context import Lifecycle, SidecarContext
from ..handoff.liveness import LivenessMonitor
from ..handoff.proxy import Proxy
from ..handoff.transfer_monitor import TransferMonitor
from ..observability.engine_counters import DataPathCounts, EngineCounters
from ..observability.metrics import Metrics, Sample
from ..observability.observer import History, RequestObserver, Tracer
from ..security.credentials import Credentials, EngineTls, listen_tls
from ..settings import Settings
from .admin import ProcessAdmin
from .engine_client import EngineHealth, fetch_all_metrics, fetch_metrics


class DataPath:
    """The components that serve requests, whoever chooses their engines."""

    def __init__(
        self,
        settings: Settings,
        tls: Callable[[HostPort], ssl.SSLContext | None],
        stack: AsyncExitStack,
        *,
        watches_transfers: bool,
        service_name: str = "tandem-sidecar",
    ) -> None:
        """`tls`: the context for a connection to an engine; None: plain TCP. `stack` closes the
        components that need it.

        `watches_transfers`: whether every leg of the engines comes from this process. Otherwise it
        sees its own legs only, and an engine's metrics count those of all. `service_name`: what
        spans say of their process.
        """
        self.lifecycle = Lifecycle(settings.drain_timeout)
        self.pool = pool = Pool(tls)
        # The stack unwinds in reverse, so the pool, which the others use, closes last.
        stack.callback(pool.close)
        self.breakers = Breakers(settings.breaker)
        self._liveness = LivenessMonitor(pool, settings.silence_timeout, settings.resume_patience)
        stack.callback(self._liveness.close)
        transfers = TransferMonitor(partial(fetch_metrics, pool) if watches_transfers else None)
        stack.callback(transfers.close)
        self._connector_options = ConnectorOptions(settings.tokenize_once, settings.peer_port)
        self.metrics, self.history = Metrics(), History(settings.history)
        tracer = _tracer(settings, service_name, self.metrics, stack)
        self.observer = RequestObserver(self.metrics, self.history, tracer)
        # After the tracer was pushed, so that it runs first: the last requests get their spans.
        stack.callback(self.observer.catch_up)
        connector = make_connector(settings.connector, self._connector_options)
        if isinstance(nixl := connector.core, Nixl):
            self.metrics.add_gauge(
                names.LOOPBACK_SIDE_CHANNELS,
                "1 for a prefill backend that names an address such as localhost for its KV: set"
                " its VLLM_NIXL_SIDE_CHANNEL_HOST where decode engines run on other machines.",
                lambda: [((str(source),), 1.0) for source in nixl.loopback_sources],
                [names.BACKEND_LABEL],
            )
        self.context = SidecarContext(
            settings,
            pool,
            connector,
            self.observer,
            self.lifecycle,
            self.breakers,
            self._liveness,
            transfers,
        )

    def engine_counters(self, engines: Callable[[], Iterable[HostPort]]) -> EngineCounters:
        """Adds what the decode `engines` count to this process's metrics."""

        def data_path_counts() -> DataPathCounts:
            # A failed load that waits for the observer's batch would otherwise be missing here, and
            # the engine's count of it would be added, too, until the next refresh.
            self.observer.catch_up()
            return DataPathCounts.of_process(self.metrics)

        async def fetch_pages() -> Mapping[HostPort, bytes | None]:
            return await fetch_all_metrics(self.pool, engines())

        return EngineCounters(fetch_pages, self.metrics, data_path_counts)

    def serve(
        self,
        handler: Handler,
        listen_tls: ServerTls | None,
        check_head: HeadCheck | None = None,
    ) -> Server:
        """A server of `handler`'s requests, which listens nowhere yet."""
        tls = None if listen_tls is None else lambda: listen_tls.context
        settings = self.context.settings
        held = HeldBytes(_held_limit(settings))
        server = Server(handler, settings.limits, tls, held, check_head)
        _add_gauges(self.metrics, self.lifecycle, server, self.breakers)
        return server

    def apply(self, new: Settings) -> None:
        """Use the settings that `reload.LIVE` names, from the next request on."""
        # A request keeps the Settings object it began with; only later requests read this one.
        self.context.settings = new
        self.lifecycle.timeout = new.drain_timeout
        self.breakers.settings = new.breaker
        self._liveness.silence = new.silence_timeout
        self.history.resize(new.history)
        self._connector_options.tokenize_once = new.tokenize_once


class Components:
    """The components of a process; nothing listens and no task runs yet."""

    def __init__(
        self, settings: Settings, keys: PlanKeys, stack: AsyncExitStack, *, is_worker: bool
    ) -> None:
        """`stack` closes the components that need it.

        `is_worker`: the supervisor reads the engine's counters, once for all workers; this process
        must not, or each event would be counted several times.
        """
        engine_tls = EngineTls(settings.tls, settings.engine, settings.ranks)
        tls = listen_tls(settings.listen_tls)
        self.credentials: tuple[Credentials | None, ...] = keys, engine_tls, tls
        self._path = path = DataPath(
            settings, engine_tls.for_address, stack, watches_transfers=not is_worker
        )
        self.lifecycle, self.overlaps = path.lifecycle, path.context.overlaps
        self.health = EngineHealth(path.pool, settings.engine, settings.health)
        self.server = path.serve(Proxy(path.context, keys, self._max_model_len), tls)

        self._counters = None if is_worker else path.engine_counters(lambda: (settings.engine,))
        self.admin = ProcessAdmin(
            metrics=path.metrics,
            observer=path.observer,
            lifecycle=path.lifecycle,
            health=self.health,
            breakers=path.breakers,
            history=path.history,
            counters=self._counters,
        )

    def _max_model_len(self) -> int | None:
        return self.health.max_model_len or self._path.context.settings.max_model_len

    def background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the process serves."""
        return [self.health.follow(), *([self._counters.follow()] if self._counters else [])]

    def apply(self, new: Settings) -> None:
        """Use the settings that `reload.LIVE` names, from the next request on."""
        self._path.apply(new)
        self.server.clients.limits = new.limits


def _tracer(
    settings: Settings, service_name: str, metrics: Metrics, stack: AsyncExitStack
) -> Tracer | None:
    if not (settings.spans and otlp.is_wanted(settings.otlp_endpoint, os.environ)):
        return None
    # OpenTelemetry takes 20 MB of memory: import it only where spans are sent.
    from ..observability.tracer import OtlpTracer  # noqa: PLC0415

    tracer = OtlpTracer(settings.otlp_endpoint, settings.pod_name, service_name)
    stack.push_async_callback(tracer.close)
    metrics.add_gauge(
        "tandem_sidecar_spans_dropped",
        "Spans dropped since the process started, because the collector did not accept them in"
        " time.",
        lambda: [((), float(tracer.dropped))],
    )
    return tracer


def _held_limit(settings: Settings) -> int:
    """Bytes of request bodies that this process may hold; by default the workers share them."""
    body, held = settings.limits.body, settings.limits.held
    return held or max(default_held_bytes(body) // settings.workers, least_held_bytes(body))


def _add_gauges(metrics: Metrics, lifecycle: Lifecycle, server: Server, breakers: Breakers) -> None:
    """Gauges computed at each scrape; a supervisor adds up those of its workers."""
    metrics.add_gauge(
        "tandem_sidecar_draining",
        "1 while the sidecar drains and refuses new requests.",
        lambda: [((), float(lifecycle.draining))],
    )
    metrics.add_gauge(
        "tandem_sidecar_connections",
        "Open client connections.",
        lambda: [((), float(len(server.clients)))],
    )
    metrics.add_gauge(
        "tandem_sidecar_held_bytes",
        "Bytes of the request bodies of all clients.",
        lambda: [((), float(server.clients.held.size))],
    )
    metrics.add_gauge(
        "tandem_sidecar_held_limit_bytes",
        "Bytes of request bodies beyond which a further one is answered with 503.",
        lambda: [((), float(server.clients.held.limit))],
    )
    metrics.add_gauge(
        "tandem_sidecar_tunnels",
        "Client connections that switched to another protocol, such as websockets.",
        lambda: [((), float(_count_tunnels(lifecycle)))],
    )
    metrics.add_gauge(
        "tandem_sidecar_breaker_open",
        "1 while a prefill pod's circuit breaker is open or half open, 0 once it has closed;"
        " absent for a pod that has neither failed nor been busy.",
        lambda: _open_breakers(breakers),
        [names.BACKEND_LABEL],
    )


def _open_breakers(breakers: Breakers) -> Iterable[Sample]:
    pods = breakers.snapshot(asyncio.get_running_loop().time())
    for address, breaker in pods.items():
        yield (address,), float(breaker.condition is not BreakerState.CLOSED)


def _count_tunnels(lifecycle: Lifecycle) -> int:
    return sum(work.describe().get("phase") == "tunnel" for work in lifecycle.work)
