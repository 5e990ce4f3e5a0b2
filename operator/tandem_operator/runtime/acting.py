"""What the leader does: kopf's watches feed `known` and the queue, workers make passes.

handlers ─► changed ─► queue ─► worker ─► loops.reconcile
resync, relisted ─► sweep ─┘
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import kopf

from tandem_kube.client import Api
from tandem_kube.errors import ApiError

from ..observed import SetKey
from ..resources.resolve import Defaults
from ..routing.router_observed import RouterSettings
from . import handlers
from .cluster import Cluster
from .known import Known, WorkKey
from .loops import Loops, Refused
from .metrics import Loop, Metrics, Result
from .queue import Queue, QueueClosed
from .sweep import sweep
from .transport import watch_transports
from .watched import may_list_nodes, optional_kinds, watched

WORKERS: Final = 8
"""Passes at once: they wait for the API server most of the time."""
END: Final = 10.0
"""Seconds for passes under way at the end, half of what Kubernetes gives a pod to leave by."""
_SETTLE: Final = 1.0
"""Seconds after a broken watch before sweeping: others break with it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
    """What to act on and how, from the flags."""

    namespaces: tuple[str, ...] = ()
    """Empty: all of the cluster."""
    resync: float = 600.0
    """Seconds between looking at everything anew."""
    defaults: Defaults = field(default_factory=Defaults)
    router: RouterSettings = field(default_factory=RouterSettings)


class Acting:
    """One leader's watches, queue and workers."""

    def __init__(self, api: Api, scope: Scope, metrics: Metrics, known: Known) -> None:
        self._api, self._scope, self._metrics, self._known = api, scope, metrics, known
        self._kinds = watched(known)
        self._queue: Queue[WorkKey] = Queue()
        self._loops = Loops(Cluster(api, known), scope.defaults, scope.router, self.changed)
        self._complete = asyncio.Event()
        self._relisted = asyncio.Event()
        metrics.watch_queue(lambda: len(self._queue))
        metrics.watch_pods(known.pod_counts)

    @classmethod
    async def begin(cls, api: Api, scope: Scope, metrics: Metrics) -> "Acting":
        """Ask what this cluster has and lets us see. Raises ApiError."""
        nodes = await may_list_nodes(api)
        if not nodes:
            log.warning("may not list nodes: whether a replica fits on any is not checked")
        kinds = await optional_kinds(api)
        known = Known(nodes=nodes, kinds=kinds, defaults=scope.defaults)
        return cls(api, scope, metrics, known)

    def changed(self, keys: set[WorkKey]) -> None:
        for key in keys:
            self._queue.add(key)

    def complete(self) -> None:
        self._complete.set()

    def relisted(self) -> None:
        self._relisted.set()

    async def run(self, stop: asyncio.Event, catch_signals: Callable[[], None]) -> None:
        """Act until `stop`, then let passes under way end. When cancelled, stop writing at once.

        kopf takes the process's signals when it starts; `catch_signals` takes them back. Raises
        what ended kopf or a worker.
        """
        end_kopf, kopf_ready = asyncio.Event(), asyncio.Event()
        workers = [asyncio.create_task(self._work()) for _ in range(WORKERS)]
        helpers = [
            asyncio.create_task(self._resync()),
            asyncio.create_task(watch_transports(self._known, self.changed)),
        ]
        signals = asyncio.create_task(_after(kopf_ready, catch_signals))
        stopping = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(self._watch(end_kopf, kopf_ready))
        try:
            await _first(stopping, watching, *workers, *helpers)
            self._queue.close()
            self._complete.set()
            await asyncio.wait(workers, timeout=END)
        finally:
            await _cancel([*workers, *helpers, signals, stopping])
            end_kopf.set()
            await asyncio.wait([watching], timeout=END)
            await _cancel([watching])

    async def _watch(self, end: asyncio.Event, ready: asyncio.Event) -> None:
        await kopf.operator(
            registry=handlers.registry(self._kinds, self._known, self, self._api.configuration),
            settings=handlers.settings(self._kinds),
            clusterwide=not self._scope.namespaces,
            namespaces=self._scope.namespaces,
            stop_flag=end,
            ready_flag=ready,
        )

    async def _work(self) -> None:
        await self._complete.wait()
        with contextlib.suppress(QueueClosed):
            while True:
                key = await self._queue.get()
                started = time.monotonic()
                try:
                    result = await self._pass(key)
                finally:
                    self._queue.done(key)
                loop: Loop = "set" if isinstance(key, SetKey) else "endpoint"
                self._metrics.reconciled(loop, result, time.monotonic() - started)

    async def _pass(self, key: WorkKey) -> Result:
        """One pass; a failed one comes again. Nothing one key does ends another's."""
        try:
            after = await self._loops.reconcile(key)
        except Refused:
            self._queue.retry(key)
            return "refused"
        except ApiError as err:
            delay = self._queue.retry(key, at_least=err.retry_after or 0.0)
            log.warning("%s: %s; trying again in %.1f s", key, err, delay)
            return "unreachable"
        except Exception:
            delay = self._queue.retry(key)
            log.exception("%s: a fault of the operator; trying again in %.1f s", key, delay)
            return "bug"
        self._queue.forget(key)
        if after is not None:
            self._queue.add_after(key, after)
        return "ok"

    async def _resync(self) -> None:
        """Every `resync` seconds, and after a watch was begun anew."""
        namespaces: Sequence[str | None] = self._scope.namespaces or (None,)
        while True:
            wait = self._scope.resync * random.uniform(0.9, 1.1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._relisted.wait(), wait)
                await asyncio.sleep(_SETTLE)
            self._relisted.clear()
            try:
                self.changed(await sweep(self._api, self._known, self._kinds, namespaces))
            except ApiError as err:
                log.warning("cannot look at everything anew: %s", err)
                self._relisted.set()
                await asyncio.sleep(_SETTLE)
                continue
            self.changed(set(self._known.keys()))


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Until one is done; its exception is raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _after(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
