"""`TandemStorageConnector`: vLLM's interface to KV in external storage.

    {"kv_connector": "TandemStorageConnector",
     "kv_connector_module_path": "tandem_vllm_storage.connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"endpoint": "http://store:8080"}}

vLLM creates one connector in its scheduler and one in each worker. `SchedulerSide` and `WorkerSide`
do the work; this module only translates between them and vLLM. The constructor raises
StorageConfigError.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tandem_contract.vllm_storage import CONNECTOR, MODULE_PATH
from tandem_kvstore.guard.breaker import BreakerState

from .block_copies import BlockCopies
from .events import to_vllm
from .identity import check_engine, identities, weights_identity
from .messages import RankLayout, StepOrders, WorkerReport
from .plan import is_handed_over
from .requests import VllmRequestReader
from .scheduler import SchedulerSide
from .settings import parse_settings
from .stats import Counts, StoragePromMetrics, StorageStats
from .worker import WorkerSide

_log = logging.getLogger(__name__)

# Registered, because MultiConnector finds the class that reads a child's stats by name only.
if CONNECTOR not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(CONNECTOR, MODULE_PATH, CONNECTOR)


RESET_MESSAGE: Final = (
    "vLLM has reset its caches, as it does when its weights change: KV is neither loaded from "
    "storage nor saved until this engine starts again"
)


class StorageMetadata(KVConnectorMetadata):
    """StepOrders in the form that vLLM sends."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class StorageWorkerMetadata(KVConnectorWorkerMetadata):
    """WorkerReport in the form that vLLM sends."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StorageWorkerMetadata":
        self.report.add(other.report)
        return self


class TandemStorageConnector(KVConnectorBase_V1, SupportsHMA):
    """One side of the connector, chosen by `role`.

    SupportsHMA: vLLM then leaves its hybrid memory allocator on. A model for which the allocator
    makes several KV cache groups is refused at the start.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        transfer = self._kv_transfer_config
        self._block = vllm_config.cache_config.block_size
        self._settings = parse_settings(transfer.kv_connector_extra_config, self._block)
        self._can_load, self._can_save = transfer.is_kv_consumer, transfer.is_kv_producer
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        # After `reset_cache`: nothing is loaded or saved any more.
        self._is_off = False
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._counts = Counts()
        if role is KVConnectorRole.SCHEDULER:
            weights = weights_identity(vllm_config, self._settings)
            events = vllm_config.kv_events_config
            has_events = events is not None and events.enable_kv_cache_events
            _log.info("KV in storage of weights %s at %s", weights, self._settings.endpoint)
            self._scheduler = SchedulerSide(
                self._settings,
                self._block,
                partial(identities, vllm_config, self._settings, weights),
                VllmRequestReader(self._block, has_events=has_events),
                self._counts,
                max_model_len=vllm_config.model_config.max_model_len,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no request waits for a save. A chunk that is not saved is computed again."""
        return False

    # The workers' side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        parallel, config = self._vllm_config.parallel_config, self._kv_cache_config
        [group] = config.kv_cache_groups
        own = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        chunk_blocks = self._settings.chunk_tokens // self._block
        copies = BlockCopies(own, config.num_blocks, chunk_blocks)
        tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        layout = RankLayout(
            tensor_parallel=(parallel.rank % tensor, tensor),
            pipeline_parallel=(parallel.rank // tensor % pipeline, pipeline),
            layout=f"vllm-{_minor_version()};{_backend(self._vllm_config)};{copies.layout}",
            dtype=copies.dtype,
            layers=copies.layers,
            chunk_bytes=copies.chunk_bytes,
        )
        self._worker = WorkerSide(self._settings, layout, copies, self._block)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, and a step computes no request that waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing: `wait_for_save` saves whole chunks after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._worker is not None:
            for load in self._worker.take_ended_loads():
                results.finished_recving.add(load.request_id)
                if not load.is_whole:
                    results.failed_recving.add(load.request_id)
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.take_report() if self._worker is not None else None
        return StorageWorkerMetadata(report) if report is not None else None

    def _orders(self) -> StepOrders:
        orders: StepOrders = self._get_connector_metadata().orders
        return orders

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Not None: the request would wait, although another connector brings its KV.
        if self._is_off or is_handed_over(request.kv_transfer_params):
            return 0, False
        self._side.begin(request)
        if not self._can_load or request.skip_reading_prefix_cache:
            return (0 if self._side.is_ready() else None), False
        tokens = self._side.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return to_vllm(self._side.take_events())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            [ids] = blocks.get_block_ids()
            self._side.start_load(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        can_save = self._can_save and not self._is_off
        scheduled = self._scheduled(scheduler_output) if can_save else []
        return StorageMetadata(self._side.orders(scheduled))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StorageWorkerMetadata):
            self._side.add_report(meta.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        return False, self._side.finish(request.request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on with empty steps: the end of a save is reported in a step."""
        return self._scheduler is not None and self._scheduler.is_writing

    def reset_cache(self) -> bool:
        """vLLM drops all cached KV: before the engine sleeps, because its weights are about to
        change, or by request. The keys name the weights of the start, and other engines use what
        is stored, so this engine uses the store no more until it starts again."""
        self._is_off = True
        self._report_reset()
        _log.warning(RESET_MESSAGE)
        return True

    def _report_reset(self) -> None:
        """Tell the operator and `tandem doctor` that this engine computes what it could load."""
        self._counts.set_breaker(BreakerState.OPEN)
        self._counts.set_failure(RESET_MESSAGE)

    def get_kv_connector_stats(self) -> StorageStats | None:
        if self._is_off:
            # Again: a look-up or a probe that ended after the reset has reported its own result.
            self._report_reset()
        data = self._counts.take()
        return StorageStats(data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StorageStats:
        return StorageStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StoragePromMetrics:
        return StoragePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None

    @property
    def _side(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("vLLM called a method of the scheduler's side in a worker")
        return self._scheduler

    def _scheduled(self, output: Any) -> list[tuple[Any, Sequence[int], int, int]]:
        """Each scheduled request with all its blocks and its tokens before and in the step."""
        counts = output.num_scheduled_tokens
        scheduled = []
        for new in output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            scheduled.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._blocks[request_id] = []
            self._blocks.setdefault(request_id, []).extend(blocks[0] if blocks else ())
            scheduled.append((request_id, computed))
        return [
            (self._requests[request_id], self._blocks[request_id], computed, counts[request_id])
            for request_id, computed in scheduled
            if request_id in self._requests
        ]


def _minor_version() -> str:
    from vllm import __version__  # noqa: PLC0415 - vLLM sets it last

    return ".".join(__version__.split(".")[:2])


def _backend(vllm_config: Any) -> str:
    """Names of the attention backends, because each packs a block in its own way."""
    context = vllm_config.compilation_config.static_forward_context
    names = {
        layer.attn_backend.get_name()
        for layer in context.values()
        if getattr(layer, "attn_backend", None) is not None
    }
    return "+".join(sorted(names))
