"""Discovery by an InferencePool: the pool is watched by name, and so are the pods it selects.

    pool appears or changes ──► list and watch its pods ──listed──► they replace the former ones
    pool is deleted or invalid ──► no backends, and the EPP is not ready

While the pods of a changed pool are listed, those of the former one are served with. A pool that
the API server does not answer for stays as it was last seen.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_kube.client import Api
from tandem_kube.reflector import Key, Reflector

from .inference_pool import InvalidPool, PoolPods, PoolReference, pool_pods
from .kubernetes_discovery import KubernetesDiscovery, discovery_metrics
from .pod_backend import PodSelection
from .pods import DiscoveredBackend

_log: Final = logging.getLogger(__name__)


class PoolDiscovery(Collector):
    """The pods of an InferencePool, and the metrics of their discovery."""

    def __init__(self, api: Api, pool: PoolReference, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the pods of the pool are listed or have changed, and when they
        no longer count."""
        self._api, self._reference, self._on_change = api, pool, on_change
        self._pods: KubernetesDiscovery | None = None
        """The pods that are served with; None: there is no pool, or its pods are not listed yet."""
        self._serving: asyncio.Task[None] | None = None
        """Watches `_pods`."""
        self._starting: asyncio.Task[None] | None = None
        """Lists the pods that will replace them."""
        self._tasks = asyncio.TaskGroup()
        self._pool = Reflector(
            api,
            pool.resource,
            pool.namespace,
            fields=f"metadata.name={pool.name}",
            parse=pool_pods,
            changed=self._pool_changed,
        )

    @property
    def is_known(self) -> bool:
        """Whether the pool exists, can be served, and its pods have been listed."""
        return self._pods is not None

    def backends(self, domain_label: str) -> list[DiscoveredBackend]:
        """As `KubernetesDiscovery.backends`; none without a pool."""
        return self._pods.backends(domain_label) if self._pods is not None else []

    async def run(self) -> None:
        """Watch the pool and its pods until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._pool.run())
            self._tasks.create_task(self._warn_if_absent())

    def collect(self) -> Iterable[Metric]:
        exists = GaugeMetricFamily(
            "tandem_epp_inference_pool",
            "1 while the InferencePool exists and can be served; 0: the EPP is not ready, and its "
            "log says why.",
        )
        pools = list(self._pool.items.values())
        exists.add_metric((), any(isinstance(pool, PoolPods) for pool in pools))
        pods = self._pods.collect() if self._pods else discovery_metrics(False, 0, ())
        return (exists, *pods)

    async def _warn_if_absent(self) -> None:
        await self._pool.synced.wait()
        if not self._pool.items:
            _log.warning("%s does not exist: not ready until it is created", self._reference)

    def _pool_changed(self, key: Key) -> None:
        pool = self._pool.items.get(key)
        # The list in progress is of what the pool selected before.
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if isinstance(pool, PoolPods):
            protocol = "HTTP/2" if pool.http2 else "HTTP/1.1"
            _log.info(
                "%s selects %s, ports %s, %s", self._reference, pool.selector, pool.ports, protocol
            )
            self._starting = self._tasks.create_task(self._watch(pool))
            return
        why = f"cannot be served: {pool.reason}" if isinstance(pool, InvalidPool) else "was deleted"
        _log.error("%s %s; not ready, without backends", self._reference, why)
        self._replace(None, None)

    async def _watch(self, pool: PoolPods) -> None:
        """Watch the pods of `pool`, and serve with them once they are listed."""
        selection = PodSelection(
            self._reference.namespace, pool.selector, pool.ports, http2=pool.http2
        )

        def on_change() -> None:
            if self._pods is pods:
                self._on_change()
            elif self._starting is task:
                self._starting = None
                self._replace(pods, task)

        pods = KubernetesDiscovery(self._api, selection, on_change)
        task = asyncio.current_task()
        await pods.run()

    def _replace(self, pods: KubernetesDiscovery | None, task: asyncio.Task[None] | None) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._pods, self._serving = pods, task
        self._on_change()
