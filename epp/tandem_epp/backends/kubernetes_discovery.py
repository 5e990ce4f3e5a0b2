"""Discovery from Kubernetes: the pods that a label selector matches, kept current by a watch.

Imported only with discovery from a cluster: the API's client costs memory and start time. While the
API server is unreachable the pods last listed remain the backends, and scrapes go on telling which
of them answer.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_kube.client import Api
from tandem_kube.reflector import Key, Reflector
from tandem_kube.resources import PODS, Object

from .pod_backend import InvalidPod, PodSelection, pod_backends, with_domain
from .pods import DiscoveredBackend

_log: Final = logging.getLogger(__name__)

WatchedPod = tuple[DiscoveredBackend, ...] | InvalidPod
"""A selected pod: its backends, or why it has none."""


class KubernetesDiscovery(Collector):
    """The selected pods, and the metrics of their discovery."""

    def __init__(self, api: Api, selection: PodSelection, on_change: Callable[[], None]) -> None:
        """`on_change` is called after the first list, and then once for all changes of one turn of
        the event loop."""
        self._on_change = on_change
        self._is_notification_due = False
        """Whether a call of `on_change` is scheduled and has not run."""
        self._selection = selection
        self._pods: Reflector[WatchedPod] = Reflector(
            api,
            PODS,
            selection.namespace,
            labels=selection.selector,
            parse=self._parse,
            changed=self._pod_changed,
        )

    @property
    def is_known(self) -> bool:
        """Whether the pods have been listed."""
        return self._pods.synced.is_set()

    def backends(self, domain_label: str) -> list[DiscoveredBackend]:
        """The selected pods that can be read, as last listed or watched. `domain_label` tells the
        fabric domain of pods without Tandem's own label."""
        return [
            with_domain(backend, domain_label)
            for pod in self._pods.items.values()
            if isinstance(pod, tuple)
            for backend in pod
        ]

    async def run(self) -> None:
        """List and watch the pods until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run())
            await self._pods.synced.wait()
            # An empty list is no change of which the reflector tells.
            self._notify_soon()

    def collect(self) -> Iterable[Metric]:
        pods = self._pods
        return discovery_metrics(pods.connected, pods.failures, list(pods.items.values()))

    def _parse(self, pod: Object) -> WatchedPod | None:
        selection = self._selection
        return pod_backends(pod, selection.target_ports, http2=selection.http2)

    def _pod_changed(self, key: Key) -> None:
        pod = self._pods.items.get(key)
        if isinstance(pod, InvalidPod):
            _log.warning("pod %s is not used as a backend: %s", key.name, pod.reason)
        self._notify_soon()

    def _notify_soon(self) -> None:
        # A relist reports every pod that differs, one call each; one notification is enough.
        if not self._is_notification_due:
            self._is_notification_due = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        # Cleared first: a change that `on_change` itself causes schedules another notification.
        self._is_notification_due = False
        self._on_change()


def discovery_metrics(
    is_connected: bool, failures: int, pods: Collection[WatchedPod]
) -> tuple[Metric, ...]:
    """The metrics of one watch of pods."""
    connected = GaugeMetricFamily(
        "tandem_epp_discovery_connected",
        "1 while a watch of the pods is open, 0 while the pods last seen are served with.",
    )
    connected.add_metric((), is_connected)
    failed = CounterMetricFamily(
        "tandem_epp_discovery_failures_total",
        "Calls to the Kubernetes API that failed, broken watches included.",
    )
    failed.add_metric((), failures)
    by_state = GaugeMetricFamily(
        "tandem_epp_discovery_pods",
        "Selected pods by state: serving, waiting (not Ready, or terminating), or unusable "
        "(a label or annotation cannot be read; the log says which).",
        labels=("state",),
    )
    usable = [pod for pod in pods if isinstance(pod, tuple)]
    serving = sum(any(backend.serving for backend in pod) for pod in usable)
    by_state.add_metric(("serving",), serving)
    by_state.add_metric(("waiting",), len(usable) - serving)
    by_state.add_metric(("unusable",), len(pods) - len(usable))
    return (connected, failed, by_state)
