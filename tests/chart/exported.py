"""Metrics that Tandem's components export: series name → its labels.

Read from the components' own registries after one event of each kind, so that tests detect a
dashboard or rule that names a series which does not exist. The reference engine stands for vLLM,
because it exports the same names.
"""

from collections.abc import Iterator
from functools import cache
from typing import cast

from prometheus_client import CollectorRegistry

from tandem_contract import vllm_storage as storage_names
from tandem_contract.config import Backend
from tandem_engine.metrics import EngineMetrics
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.inference_pool import PoolReference
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.backends.pool_discovery import PoolDiscovery
from tandem_epp.flow.metrics import FlowMetrics
from tandem_epp.metrics.counters import Metrics as EppMetrics
from tandem_epp.replicas.peers.metrics import PeerMetrics
from tandem_kube.client import Api
from tandem_kvstore.guard.breaker import BreakerState
from tandem_operator.runtime.metrics import Metrics as OperatorMetrics
from tandem_planner.prefill_fit import PrefillSample
from tandem_sidecar.observability.metrics import Metrics as SidecarMetrics
from tandem_sidecar.observability.moves import MoveCause, MoveReport, MoveResult
from tandem_sidecar.observability.observer import RequestObserver
from tandem_sidecar.observability.record import MoveMethod

TARGET_LABELS = frozenset({"namespace", "pod", "tandem_pool", "tandem_role", "tandem_endpoint"})
"""Labels that the PodMonitors add to every scraped series."""


class _Idle:
    running = waiting = waiting_for_kv = held_requests = 0
    kv_usage = 0.0


@cache
def exported_series() -> dict[str, frozenset[str]]:
    """Every series name with the labels that a query may use."""
    return {
        sample.name: frozenset(sample.labels) | TARGET_LABELS
        for registry in (_sidecar(), _epp(), _engine(), _operator())
        for metric in registry.collect()
        for sample in metric.samples
    } | _vllm_storage()


def recorded_series(rules: list[dict[str, str]]) -> Iterator[str]:
    """Series that recording rules add."""
    yield from (rule["record"] for rule in rules if "record" in rule)


def _sidecar() -> CollectorRegistry:
    metrics = SidecarMetrics()
    RequestObserver(metrics)
    metrics.prefill.child("b").observe(1)
    metrics.decode.child("b").observe(1)
    metrics.count_unified("short")
    metrics.count_move(
        MoveReport(
            0.0, MoveCause.CRASH, MoveMethod.CONTINUED, MoveResult.DONE, "a", "b", 1, gap=1.0
        )
    )
    return metrics.registry


def _epp() -> CollectorRegistry:
    fleet = Fleet()
    fleet.apply([DiscoveredBackend(Backend("b", "http://127.0.0.1:1"))])
    for pod in fleet:
        pod.estimates.prefill.add(PrefillSample(1, 100.0, 1e4, 1.0), 0.0)
        fleet.ejections.record(pod, Outcome.ANSWERED, 0.0, 0.0)
    metrics = EppMetrics(fleet)
    metrics.decisions.child("unified", "short")
    metrics.fallbacks.child("no_prefill_backend", "unified")
    metrics.observe_hit_ratio(1, 2, "index")
    PeerMetrics(metrics.registry)
    flow = FlowMetrics(metrics.registry)
    flow.held(0, 1, 1)
    flow.ended(0, "went", 1.0)
    metrics.observe_ttft(1.0, 2.0, "unified")
    # PoolDiscovery does not call the API until it runs.
    api = cast("Api", None)
    pods = PoolDiscovery(api, PoolReference("namespace", "pool"), lambda: None)
    metrics.registry.register(pods)
    return metrics.registry


def _engine() -> CollectorRegistry:
    metrics = EngineMetrics("m")
    metrics.record_breaker(BreakerState.OPEN)
    metrics.record_failure("no answer in time")
    metrics.watch(_Idle, block_size=16, num_blocks=1)
    return metrics.registry


def _vllm_storage() -> dict[str, frozenset[str]]:
    """By the names in the contract: the connector's own registry needs vLLM."""
    reason = frozenset({"reason"}) | TARGET_LABELS
    return {
        storage_names.BREAKER_STATE: TARGET_LABELS,
        f"{storage_names.LOADED_TOKENS}_total": TARGET_LABELS,
        f"{storage_names.STORED_TOKENS}_total": TARGET_LABELS,
        f"{storage_names.NOT_LOADED_CHUNKS}_total": reason,
        f"{storage_names.NOT_STORED_CHUNKS}_total": reason,
    }


def _operator() -> CollectorRegistry:
    metrics = OperatorMetrics()
    metrics.count_reconciliation("set", "ok", 1.0)
    metrics.count_api_call("get", 200, 0.1)
    metrics.watch_queue(lambda: 0)
    metrics.watch_pods(lambda: [("n", "p", "decode", "ready", 1)])
    return metrics.registry
