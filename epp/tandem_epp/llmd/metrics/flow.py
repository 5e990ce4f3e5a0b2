"""What waits in flow control, under llm-d's names, made at each scrape."""

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tandem_contract.fast_metrics import OTHER

from ...backends.fleet import UNLISTED
from ...flow.elsewhere import Group, Share
from .families import FLOW, Names, Pool, gauges

_LABELS: Final = ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name")
_MOST: Final = 1000
"""Models and priorities whose 0 is shown once nothing of them waits any more."""

SIZE: Final = Names(
    "flow_control_queue_size", _LABELS, "Requests that wait at this replica of the EPP.",
    "inference_extension_flow_control_queue_size", _LABELS,
)  # fmt: skip
BYTES: Final = Names(
    "flow_control_queue_bytes", _LABELS, "Bytes of their bodies.",
    "inference_extension_flow_control_queue_bytes", _LABELS,
)  # fmt: skip


def add_flow_metrics(
    registry: CollectorRegistry, waiting: Mapping[Group, Share], pool: Pool
) -> None:
    """Export what waits here: `WaitingElsewhere.own`."""
    registry.register(_FlowCollector(waiting, pool))


class _FlowCollector(Collector):
    def __init__(self, waiting: Mapping[Group, Share], pool: Pool) -> None:
        self._waiting, self._pool = waiting, pool
        self._shown: dict[tuple[str, int], None] = {}
        """Models and priorities of which something waits, or waited at an earlier scrape."""

    def collect(self) -> Iterable[Metric]:
        """The metrics now."""
        found: dict[tuple[str, int], tuple[int, int]] = dict.fromkeys(self._shown, (0, 0))
        for group, share in self._waiting.items():
            model = OTHER if group.model == UNLISTED else group.model or ""
            requests, size = found.get((model, group.priority), (0, 0))
            found[model, group.priority] = requests + share.requests, size + share.size
        if len(found) > _MOST:
            found = {key: value for key, value in found.items() if value[0]}
        self._shown = dict.fromkeys(found)
        rows = [(self._labels(*key), value) for key, value in found.items()]
        return [
            *gauges(SIZE, [(labels, requests) for labels, (requests, _) in rows]),
            *gauges(BYTES, [(labels, size) for labels, (_, size) in rows]),
        ]

    def _labels(self, model: str, priority: int) -> Mapping[str, str]:
        return FLOW | {
            "priority": str(priority),
            "inference_pool": self._pool.name,
            "model_name": model,
            "target_model_name": model,
        }
