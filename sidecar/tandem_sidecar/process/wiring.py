"""Creates the components of one serving process and connects them."""

import asyncio
import os
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from tandem_contract import metrics as names
from tandem_contract import otlp

from ..connectors import ConnectorOptions, make_connector
from ..handoff.breaker import Breakers, BreakerState
from ..handoff.context import Lifecycle, SidecarContext
from ..handoff.liveness import LivenessMonitor
from ..handoff.proxy import Proxy
from ..handoff.transfer_monitor import TransferMonitor
from ..http.server import Server
from ..http.upstream import Pool
from ..observability.engine_counters import DataPathCounts, EngineCounters
from ..observability.metrics import Metrics, Sample
from ..observability.observer import History, RequestObserver, Tracer
from ..security.credentials import EngineTls, PlanKeys, listen_tls
from ..settings import Settings
from .admin import ProcessAdmin
from .engine_client import EngineHealth, fetch_metrics


class Components:
    """The components of a process; nothing listens and no task runs yet."""

    def __init__(
        self, settings: Settings, keys: PlanKeys, stack: AsyncExitStack, *, is_worker: bool
    ) -> None:
        """`stack` closes the components that need it.

        `is_worker`: the supervisor reads the engine's counters, once for all workers; this process
        must not, or each event would be counted several times.
        """
        self.engine_tls = EngineTls(settings.tls, settings.engine, settings.ranks)
        self.listen_tls = listen_tls(settings.listen_tls)
        self.lifecycle = Lifecycle(settings.drain_timeout)
        pool = Pool(self.engine_tls.for_address)
        # The stack unwinds in reverse, so the pool, which the others use, closes last.
        stack.callback(pool.close)
        self._breakers = Breakers(settings.breaker)
        self._liveness = LivenessMonitor(pool, settings.silence_timeout)
        stack.callback(self._liveness.close)
        # Each worker sees its own legs only, and the engine counts those of all.
        transfers = TransferMonitor(None if is_worker else partial(fetch_metrics, pool))
        stack.callback(transfers.close)
        self._connector_options = ConnectorOptions(settings.tokenize_once, settings.peer_port)
        metrics, self._history = Metrics(), History(settings.history)
        observer = RequestObserver(metrics, self._history, _tracer(settings, metrics, stack))
        # After the tracer was pushed, so that it runs first: the last requests get their spans.
        stack.callback(observer.catch_up)
        self._context = SidecarContext(
            settings,
            pool,
            make_connector(settings.connector, self._connector_options),
            observer,
            self.lifecycle,
            self._breakers,
            self._liveness,
            transfers,
        )
        self.overlaps = self._context.overlaps
        tls = self.listen_tls
        self.server = Server(
            Proxy(self._context, keys),
            settings.limits,
            None if tls is None else lambda: tls.context,
        )
        _add_gauges(metrics, self.lifecycle, self.server, self._breakers)
        self.health = EngineHealth(pool, settings.engine, settings.health)

        def data_path_counts() -> DataPathCounts:
            # A failed load that waits for the observer's batch would otherwise be missing here, and
            # the engine's count of it would be added, too, until the next refresh.
            observer.catch_up()
            return DataPathCounts.of_process(metrics)

        fetch_page = partial(fetch_metrics, pool, settings.engine)
        self._counters = (
            None if is_worker else EngineCounters(fetch_page, metrics, data_path_counts)
        )
        self.admin = ProcessAdmin(
            metrics=metrics,
            observer=observer,
            lifecycle=self.lifecycle,
            health=self.health,
            breakers=self._breakers,
            history=self._history,
            counters=self._counters,
        )

    def background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the process serves."""
        return [self.health.follow(), *([self._counters.follow()] if self._counters else [])]

    def apply(self, new: Settings) -> None:
        """Use the settings that `reload.LIVE` names, from the next request on."""
        # A request keeps the Settings object it began with; only later requests read this one.
        self._context.settings = new
        self.server.limits = new.limits
        self.lifecycle.timeout = new.drain_timeout
        self._breakers.settings = new.breaker
        self._liveness.silence = new.silence_timeout
        self._history.resize(new.history)
        self._connector_options.tokenize_once = new.tokenize_once


def _tracer(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> Tracer | None:
    if not (settings.spans and otlp.is_wanted(settings.otlp_endpoint, os.environ)):
        return None
    # OpenTelemetry takes 20 MB of memory: import it only where spans are sent.
    from ..observability.tracer import OtlpTracer  # noqa: PLC0415

    tracer = OtlpTracer(settings.otlp_endpoint, settings.pod_name)
    stack.push_async_callback(tracer.close)
    metrics.add_gauge(
        "tandem_sidecar_spans_dropped",
        "Spans dropped since the process started, because the collector did not accept them in"
        " time.",
        lambda: [((), float(tracer.dropped))],
    )
    return tracer


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
