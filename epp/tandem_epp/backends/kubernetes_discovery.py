"""Discovery from Kubernetes: the pods that a label selector matches, kept current by a watch.

Imported in this mode only: the API's client costs memory and start time. While the API is away the
pods last seen stay, and scrapes go on to tell which of them answer.
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

from .pod_backend import PodSelection, Unusable, member
from .pods import Member

_log: Final = logging.getLogger(__name__)


class ClusterPods(Collector):
    """The selected pods, and this discovery's metrics."""

    def __init__(self, api: Api, selection: PodSelection, changed: Callable[[], None]) -> None:
        """`changed` is called once for any number of changes seen together."""
        self._changed, self._told = changed, False
        self._port = selection.target_port
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
        """Set once the pods have been listed."""
        return self._pods.synced

    @property
    def members(self) -> list[Member]:
        """The pods that can be used, as last seen."""
        return [found for found in self._pods.items.values() if isinstance(found, Member)]

    async def run(self) -> NoReturn:
        """Keep the pods current until cancelled."""
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
        pods = GaugeMetricFamily(
            "tandem_epp_discovery_pods",
            "Selected pods by state: serving, waiting (not ready, or leaving), or unusable (what "
            "they are labelled with cannot be read; the log says why).",
            labels=("state",),
        )
        found = list(self._pods.items.values())
        serving = sum(isinstance(each, Member) and each.serving for each in found)
        unusable = sum(isinstance(each, Unusable) for each in found)
        pods.add_metric(("serving",), serving)
        pods.add_metric(("waiting",), len(found) - serving - unusable)
        pods.add_metric(("unusable",), unusable)
        return (connected, failures, pods)

    def _parse(self, body: Object) -> Member | Unusable | None:
        return member(body, self._port)

    def _pod_changed(self, key: Key) -> None:
        found = self._pods.items.get(key)
        if isinstance(found, Unusable):
            _log.warning("pod %s is not used: %s", key.name, found.reason)
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = False
        self._changed()
