"""Discovery from Kubernetes: the pods that a label selector matches, kept current by a watch.

Imported only with `--discovery kubernetes`: the API's client costs memory and start time. While the
API server is unreachable the pods last listed remain the backends, and scrapes go on telling which
of them answer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem_kube.client import Api
from tandem_kube.reflector import Key, Reflector
from tandem_kube.resources import PODS, Object

from .pod_backend import InvalidPod, PodSelection, pod_backend, with_domain
from .pods import DiscoveredBackend

_log: Final = logging.getLogger(__name__)


class KubernetesDiscovery(Collector):
    """The selected pods, and the metrics of their discovery."""

    def __init__(self, api: Api, selection: PodSelection, on_change: Callable[[], None]) -> None:
        """`on_change` is called once for all changes of one turn of the event loop."""
        self._on_change = on_change
        self._is_notification_due = False
        """Whether a call of `on_change` is scheduled and has not run."""
        self._default_port = selection.target_port
        self._pods = Reflector(
            api,
            PODS,
            selection.namespace,
            labels=selection.selector,
            parse=self._parse,
            changed=self._pod_changed,
        )

    @property
    def synced(self) -> asyncio.Event:
        """Set once the pods have been listed for the first time."""
        return self._pods.synced

    def backends(self, domain_label: str) -> list[DiscoveredBackend]:
        """The selected pods that can be read, as last listed or watched. `domain_label` tells the
        fabric domain of pods without Tandem's own label."""
        return [
            with_domain(pod, domain_label)
            for pod in self._pods.items.values()
            if isinstance(pod, DiscoveredBackend)
        ]

    async def run(self) -> NoReturn:
        """List and watch the pods until cancelled."""
        await self._pods.run()

    def collect(self) -> Iterable[Metric]:
        connected = GaugeMetricFamily(
            "tandem_epp_discovery_connected",
            "1 while a watch of the pods is open, 0 while the pods last seen are served with.",
        )
        connected.add_metric((), self._pods.connected)
        failures = CounterMetricFamily(
            "tandem_epp_discovery_failures_total",
            "Calls to the Kubernetes API that failed, broken watches included.",
        )
        failures.add_metric((), self._pods.failures)
        by_state = GaugeMetricFamily(
            "tandem_epp_discovery_pods",
            "Selected pods by state: serving, waiting (not Ready, or terminating), or unusable "
            "(a label or annotation cannot be read; the log says which).",
            labels=("state",),
        )
        pods = list(self._pods.items.values())
        serving = sum(isinstance(pod, DiscoveredBackend) and pod.serving for pod in pods)
        unusable = sum(isinstance(pod, InvalidPod) for pod in pods)
        by_state.add_metric(("serving",), serving)
        by_state.add_metric(("waiting",), len(pods) - serving - unusable)
        by_state.add_metric(("unusable",), unusable)
        return (connected, failures, by_state)

    def _parse(self, pod: Object) -> DiscoveredBackend | InvalidPod | None:
        return pod_backend(pod, self._default_port)

    def _pod_changed(self, key: Key) -> None:
        pod = self._pods.items.get(key)
        if isinstance(pod, InvalidPod):
            _log.warning("pod %s is not used as a backend: %s", key.name, pod.reason)
        # A relist reports every pod that differs, one call each; one notification is enough.
        if not self._is_notification_due:
            self._is_notification_due = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        # Cleared first: a change that `on_change` itself causes schedules another notification.
        self._is_notification_due = False
        self._on_change()
