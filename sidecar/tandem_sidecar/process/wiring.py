"""What one serving process is made of, and how its parts know each other."""

import os
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from tandem_contract import otlp

from ..connectors import make
from ..connectors.nixl import Nixl
from ..handoff.breaker import Breakers
from ..handoff.context import Tools
from ..handoff.lifecycle import Lifecycle
from ..handoff.liveness import Vigil
from ..handoff.proxy import Proxy
from ..http.server import Server
from ..http.upstream import Pool
from ..observability.engine_counters import EngineCounters, Seen, metrics_page
from ..observability.history import History
from ..observability.metrics import Metrics
from ..observability.observer import Observer, Tracer
from ..security.credentials import EngineTls, PlanKeys
from ..settings import Settings
from . import gauges
from .admin import Admin
from .health import EngineHealth


class Parts:
    """The parts, none of which listens yet."""

    def __init__(
        self, settings: Settings, keys: PlanKeys, stack: AsyncExitStack, *, alone: bool
    ) -> None:
        """`alone`: no supervisor reads the engine's counters for this process and its like.

        `stack` closes what has to be closed.
        """
        self.certificates = EngineTls(settings.tls, settings.engine)
        self.lifecycle = Lifecycle(settings.drain_timeout)
        pool = Pool(self.certificates.for_address)
        stack.callback(pool.close)
        self._breakers = Breakers(settings.breaker)
        self._vigil = Vigil(pool, settings.silence_timeout)
        stack.callback(self._vigil.close)
        self._connector = make(
            settings.connector, tokenize_once=settings.tokenize_once, peer_port=settings.peer_port
        )
        metrics, self._history = Metrics(), History(settings.history)
        observer = Observer(metrics, self._history, _tracer(settings, metrics, stack))
        stack.callback(observer.catch_up)
        self._tools = Tools(
            settings,
            pool,
            self._connector,
            observer,
            self.lifecycle,
            self._breakers,
            self._vigil,
        )
        self.clients = Server(Proxy(self._tools, keys), settings.limits)
        gauges.export(metrics, self.lifecycle, self.clients, self._breakers)
        self.health = EngineHealth(pool, settings.engine)
        engine_page = partial(metrics_page, pool, settings.engine)

        def seen() -> Seen:
            observer.catch_up()
            return Seen.by(metrics)

        self._counters = EngineCounters(engine_page, metrics, seen) if alone else None
        self.admin = Admin(
            metrics=metrics,
            observer=observer,
            lifecycle=self.lifecycle,
            health=self.health,
            breakers=self._breakers,
            history=self._history,
            counters=self._counters,
        )

    def chores(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the process serves."""
        return [self.health.watch(), *([self._counters.watch()] if self._counters else [])]

    def apply(self, new: Settings) -> None:
        """Take over what `reload.LIVE` names, from the next request on."""
        self._tools.settings = new
        self.clients.limits = new.limits
        self.lifecycle.timeout = new.drain_timeout
        self._breakers.settings = new.breaker
        self._vigil.silence = new.silence_timeout
        self._history.resize(new.history)
        if isinstance(self._connector, Nixl):
            self._connector.tokenize_once = new.tokenize_once


def _tracer(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> Tracer | None:
    if not otlp.is_wanted(settings.otlp_endpoint, os.environ):
        return None
    # OpenTelemetry costs a process 20 MB: only where something is traced.
    from ..observability import tracer  # noqa: PLC0415

    made = tracer.Tracer(settings.otlp_endpoint, settings.pod_name)
    stack.push_async_callback(made.close)
    metrics.watch(
        "tandem_sidecar_spans_dropped",
        "Spans that no collector has taken, since the process began.",
        lambda: [((), float(made.dropped))],
    )
    return made
