"""The leader's work: watches fill the cache and the queue, and workers reconcile keys.

watches ──► cache ──► queue ──► worker ──► Reconcilers.reconcile
              ▲                                   │
              └────── answers to our writes ◄─────┘
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from tandem_kube.client import Api
from tandem_kube.errors import ApiError

from ..observed import SetKey
from ..resources.resolve import Defaults
from ..routing.endpoint.settings import RouterSettings
from .cache import ClusterCache, WorkKey
from .cluster import Cluster
from .feeds import Feeds
from .kv_transport_probe import probe_kv_transports
from .metrics import Loop, Metrics, Result
from .queue import Queue, QueueClosed
from .reconcilers import Reconcilers, WritesRefused
from .storage_probe import probe_storage
from .watches import may_list_nodes

WORKERS: Final = 8
"""Concurrent reconciliations; most of the time they wait for the API server."""
SHUTDOWN_TIMEOUT: Final = 10.0
"""Seconds for reconciliations in progress at shutdown. Kubernetes kills the pod after 30 by
default."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
    """Which namespaces the operator serves and with which settings, from the flags."""

    namespaces: tuple[str, ...] = ()
    """Empty: all namespaces."""
    resync: float = 600.0
    """Seconds between reconciliations of every set and endpoint without any change. Watches report
    changes at once, so this bounds only how long the effect of a fault of the operator lasts. Too
    low: constant load on the operator."""
    defaults: Defaults = field(default_factory=Defaults)
    """Images and networks for what a pool leaves out."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """Settings of the Envoy and the EPP of every endpoint."""


class Controller:
    """Watches, queue and workers of the replica that leads; a `watches.WatchListener`."""

    def __init__(self, api: Api, scope: Scope, metrics: Metrics, cache: ClusterCache) -> None:
        self._api, self._scope, self._metrics, self._cache = api, scope, metrics, cache
        self._queue: Queue[WorkKey] = Queue()
        self._reconcilers = Reconcilers(
            Cluster(api, cache), scope.defaults, scope.router, self.enqueue
        )
        namespaces: Sequence[str | None] = scope.namespaces or (None,)
        self._feeds = Feeds(api, cache, namespaces, self)
        # Only the leader has a queue and a cache, so that followers do not export these metrics.
        metrics.watch_queue(lambda: len(self._queue))
        metrics.watch_pods(cache.pod_counts)

    @classmethod
    async def create(cls, api: Api, scope: Scope, metrics: Metrics) -> "Controller":
        """Find out whether nodes may be listed. Raises ApiError."""
        nodes = await may_list_nodes(api)
        if not nodes:
            log.warning(
                "RBAC does not let the operator list nodes: it cannot check whether a replica fits"
                " on any node"
            )
        cache = ClusterCache(nodes=nodes, defaults=scope.defaults)
        return cls(api, scope, metrics, cache)

    def enqueue(self, keys: set[WorkKey]) -> None:
        for key in keys:
            self._queue.add(key)

    def enqueue_namespace(self, namespace: str | None) -> None:
        self.enqueue({k for k in self._cache.work_keys() if namespace in (None, k.namespace)})

    async def run(self, stop: asyncio.Event) -> None:
        """Reconcile until `stop` is set, then let reconciliations in progress end.

        When cancelled, stop writing at once. Raises whatever ended a worker or a watch.
        """
        workers = [asyncio.create_task(self._run_worker()) for _ in range(WORKERS)]
        helpers = [
            asyncio.create_task(self._feeds.run()),
            asyncio.create_task(self._resync()),
            asyncio.create_task(probe_kv_transports(self._cache, self.enqueue)),
            asyncio.create_task(probe_storage(self._cache, self.enqueue)),
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            # All tasks but `stopping` run until they fail. The failure of any of them ends the
            # process, and a restarted one begins with fresh lists.
            await _first_completed(stopping, *workers, *helpers)
            self._queue.close()
            await asyncio.wait(workers, timeout=SHUTDOWN_TIMEOUT)
        finally:
            await _cancel([*workers, *helpers, stopping])

    async def _run_worker(self) -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                key = await self._queue.get()
                if not self._feeds.is_complete(key.namespace):
                    # The last of the namespace's first lists enqueues the key again.
                    self._queue.done(key)
                    continue
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

    async def _resync(self) -> NoReturn:
        """Reconcile everything every `resync` seconds."""
        while True:
            await asyncio.sleep(self._scope.resync * random.uniform(0.9, 1.1))
            self.enqueue_namespace(None)


async def _first_completed(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one task is done; raise its exception if it has one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
