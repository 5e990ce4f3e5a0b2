"""The leader's work: watches fill the cache and the queue, and workers reconcile keys.

kopf watches ──► cache ──► queue ──► worker ──► Reconcilers.reconcile
periodic relist ──┘ ▲                                 │
                    └──── answers to our writes ◄─────┘
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
from ..routing.endpoint.settings import RouterSettings
from . import watches
from .cache import ClusterCache, WorkKey
from .cluster import Cluster
from .kv_transport_probe import probe_kv_transports
from .metrics import Loop, Metrics, Result
from .queue import Queue, QueueClosed
from .reconcilers import Reconcilers, WritesRefused

WORKERS: Final = 8
"""Concurrent reconciliations; most of the time they wait for the API server."""
SHUTDOWN_TIMEOUT: Final = 10.0
"""Seconds for reconciliations in progress at shutdown, and as many again for kopf. Kubernetes kills
the pod after 30 by default."""
_RELIST_DELAY: Final = 1.0
"""Seconds between a broken watch and the relist: usually several watches break together."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
    """Which namespaces the operator serves and with which settings, from the flags."""

    namespaces: tuple[str, ...] = ()
    """Empty: all namespaces."""
    resync: float = 600.0
    """Seconds between relists; each also reconciles every set and endpoint. Watches report changes
    at once, so this bounds only how long a missed deletion stays unnoticed. Too low: constant load
    on the API server. Too high: such an object is not created again for that long."""
    defaults: Defaults = field(default_factory=Defaults)
    """Images and networks for what a pool leaves out."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """Settings of the Envoy and the EPP of every endpoint."""


class Controller:
    """Watches, queue and workers of the replica that leads; a `watches.WatchListener`."""

    def __init__(self, api: Api, scope: Scope, metrics: Metrics, cache: ClusterCache) -> None:
        self._api, self._scope, self._metrics, self._cache = api, scope, metrics, cache
        self._watches = watches.watches(cache)
        self._queue: Queue[WorkKey] = Queue()
        self._reconcilers = Reconcilers(
            Cluster(api, cache), scope.defaults, scope.router, self.enqueue
        )
        # Set by the first watch event, when the cache holds the first lists of all kinds.
        self._synced = asyncio.Event()
        self._relist_requested = asyncio.Event()
        # Only the leader has a queue and a cache, so that followers do not export these metrics.
        metrics.watch_queue(lambda: len(self._queue))
        metrics.watch_pods(cache.pod_counts)

    @classmethod
    async def create(cls, api: Api, scope: Scope, metrics: Metrics) -> "Controller":
        """Discover which kinds the cluster serves and whether nodes may be listed.

        Raises ApiError.
        """
        nodes = await watches.may_list_nodes(api)
        if not nodes:
            log.warning(
                "RBAC does not let the operator list nodes: it cannot check whether a replica fits"
                " on any node"
            )
        kinds = await watches.discover_optional_kinds(api)
        cache = ClusterCache(nodes=nodes, kinds=kinds, defaults=scope.defaults)
        return cls(api, scope, metrics, cache)

    def enqueue(self, keys: set[WorkKey]) -> None:
        for key in keys:
            self._queue.add(key)

    def mark_synced(self) -> None:
        self._synced.set()

    def request_relist(self) -> None:
        self._relist_requested.set()

    async def run(self, stop: asyncio.Event, catch_signals: Callable[[], None]) -> None:
        """Reconcile until `stop` is set, then let reconciliations in progress end.

        When cancelled, stop writing at once. kopf installs its own signal handlers when it starts;
        `catch_signals` installs ours again. Raises whatever ended kopf or a worker.
        """
        # kopf has a stop flag of its own, set only after the workers have ended: until then the
        # watches feed the cache on which the last reconciliations decide.
        stop_kopf, kopf_ready = asyncio.Event(), asyncio.Event()
        workers = [asyncio.create_task(self._run_worker()) for _ in range(WORKERS)]
        helpers = [
            asyncio.create_task(self._relist_periodically()),
            asyncio.create_task(probe_kv_transports(self._cache, self.enqueue)),
        ]
        signals = asyncio.create_task(_call_after(kopf_ready, catch_signals))
        stopping = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(self._run_kopf(stop_kopf, kopf_ready))
        try:
            # All tasks but `stopping` run until they fail. The failure of any of them ends the
            # process, and a restarted one begins with fresh lists.
            await _first_completed(stopping, watching, *workers, *helpers)
            self._queue.close()
            # Releases workers that still wait for the first lists; the closed queue ends them.
            self._synced.set()
            await asyncio.wait(workers, timeout=SHUTDOWN_TIMEOUT)
        finally:
            # Workers first: after a lost lease nothing may be written while kopf takes its time.
            await _cancel([*workers, *helpers, signals, stopping])
            stop_kopf.set()
            await asyncio.wait([watching], timeout=SHUTDOWN_TIMEOUT)
            await _cancel([watching])

    async def _run_kopf(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        await kopf.operator(
            registry=watches.kopf_registry(
                self._watches, self._cache, self, self._api.configuration
            ),
            settings=watches.kopf_settings(self._watches),
            clusterwide=not self._scope.namespaces,
            namespaces=self._scope.namespaces,
            stop_flag=stop,
            ready_flag=ready,
        )

    async def _run_worker(self) -> None:
        # An incomplete cache would make existing pods look missing and create them again.
        await self._synced.wait()
        with contextlib.suppress(QueueClosed):
            while True:
                key = await self._queue.get()
                started = time.monotonic()
                try:
                    result = await self._reconcile(key)
                finally:
                    # Also after an error: a key that stayed active would never be given to a worker
                    # again.
                    self._queue.done(key)
                loop: Loop = "set" if isinstance(key, SetKey) else "endpoint"
                self._metrics.count_reconciliation(loop, result, time.monotonic() - started)

    async def _reconcile(self, key: WorkKey) -> Result:
        """Reconcile `key` once and requeue it after a failure, which never affects other keys."""
        try:
            requeue_after = await self._reconcilers.reconcile(key)
        # Not logged: the pool's status and its events have the API server's message.
        except WritesRefused:
            self._queue.retry(key)
            return "refused"
        except ApiError as err:
            delay = self._queue.retry(key, at_least=err.retry_after or 0.0)
            log.warning("%s: API call failed: %s; retrying in %.1f s", key, err, delay)
            return "unreachable"
        except Exception:
            delay = self._queue.retry(key)
            log.exception("%s: bug in the operator; retrying in %.1f s", key, delay)
            return "bug"
        self._queue.forget(key)
        if requeue_after is not None:
            self._queue.add_after(key, requeue_after)
        return "ok"

    async def _relist_periodically(self) -> None:
        """Relist every `resync` seconds and whenever a watch started over; enqueue every key."""
        namespaces: Sequence[str | None] = self._scope.namespaces or (None,)
        while True:
            wait = self._scope.resync * random.uniform(0.9, 1.1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._relist_requested.wait(), wait)
                await asyncio.sleep(_RELIST_DELAY)
            # Cleared before the lists: a watch that breaks during them causes another relist.
            self._relist_requested.clear()
            try:
                self.enqueue(
                    await watches.relist(self._api, self._cache, self._watches, namespaces)
                )
            except ApiError as err:
                # Nothing was removed from the cache, and the watches keep feeding it.
                log.warning("relist failed, retrying: %s", err)
                self._relist_requested.set()
                await asyncio.sleep(_RELIST_DELAY)
                continue
            # Unchanged keys too: `resync` limits how long the effect of a missed event can last.
            self.enqueue(set(self._cache.work_keys()))


async def _first_completed(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one task is done; raise its exception if it has one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _call_after(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
