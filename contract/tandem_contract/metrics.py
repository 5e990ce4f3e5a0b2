"""Names of the metrics that one component exports and another reads.

Dashboards depend on these names. Counters are listed with the suffix `_total` that Prometheus sees.
"""

from enum import StrEnum
from typing import Final

# Exported by the sidecar.
REQUESTS: Final = "disaggregated_requests_total"
PREFILL_SECONDS: Final = "disaggregated_prefill_duration_seconds"
DECODE_SECONDS: Final = "disaggregated_decode_duration_seconds"
KV_TRANSFER_SECONDS: Final = "disaggregated_kv_transfer_duration_seconds"
FALLBACKS: Final = "disaggregated_fallback_total"
ERRORS: Final = "disaggregated_errors_total"

UNSERVED: Final = "tandem_sidecar_unserved_total"
"""Those of REQUESTS that no engine answered, with the same label. Sidecar → `tandem status`."""

# Their labels.
STREAMED_HANDOFFS: Final = "tandem_sidecar_streamed_handoffs_total"
"""Hand-offs whose KV moved while the prefill computed it. Sidecar → `tandem doctor`."""
LOOPBACK_SIDE_CHANNELS: Final = "tandem_sidecar_loopback_side_channels"
"""1 for a prefill backend, by its address, that names an address such as localhost for its KV.
Sidecar and router → `tandem doctor`."""
ROUTING_PATH_LABEL: Final = "routing_path"
"""Label of REQUESTS: a `RoutingPath` value."""
PHASE_LABEL: Final = "phase"
"""Label of ERRORS: an `ErrorPhase` value."""
BACKEND_LABEL: Final = "backend"
"""Label of PREFILL_SECONDS and DECODE_SECONDS: the name of a backend."""

EPP_FLOW_ASKED: Final = "tandem_epp_flow_asked_seconds"
"""EPP → doctor: what gateways in mode BUFFERED were last asked to wait for; 0: none was."""

# Exported by every engine under vLLM's names, read by the EPP, the demo and `tandem status`.
ENGINE_RUNNING: Final = "vllm:num_requests_running"
ENGINE_WAITING: Final = "vllm:num_requests_waiting"
ENGINE_KV_FETCH: Final = "vllm:num_requests_kv_fetch_by_stage"
KV_FETCH_LOADING: Final = "in_progress"
"""Value of ENGINE_KV_FETCH's label `stage`: the load has started and not been reported finished."""
ENGINE_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
ENGINE_CACHE_CONFIG: Final = "vllm:cache_config_info"
ENGINE_PREFIX_QUERIES: Final = "vllm:prefix_cache_queries_total"
ENGINE_PREFIX_HITS: Final = "vllm:prefix_cache_hits_total"
ENGINE_EXTERNAL_QUERIES: Final = "vllm:external_prefix_cache_queries_total"
ENGINE_EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"
ENGINE_PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
ENGINE_GENERATION_TOKENS: Final = "vllm:generation_tokens_total"
ENGINE_XFER_SECONDS: Final = "vllm:nixl_xfer_time_seconds"
ENGINE_XFER_BYTES: Final = "vllm:nixl_bytes_transferred"
ENGINE_XFER_FAILED: Final = "vllm:nixl_num_failed_transfers_total"
ENGINE_HANDSHAKES_FAILED: Final = "vllm:nixl_num_failed_handshakes_total"
ENGINE_KV_EXPIRED: Final = "vllm:nixl_num_kv_expired_reqs_total"
PROCESS_START_TIME: Final = "process_start_time_seconds"
"""Unix seconds. A new value means that the process restarted: its caches are empty, its counters 0.
Engine → EPP; sidecar → `tandem status`."""
ENGINE_WAITING_BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
"""Label `reason`: `capacity`, or `deferred` for those waiting for remote KV."""
ENGINE_PROMPT_BY_SOURCE: Final = "vllm:prompt_tokens_by_source_total"
"""Label `source`: a `PromptSource` value."""
ENGINE_SUCCESS: Final = "vllm:request_success_total"
"""Label `finished_reason`."""
ENGINE_PREEMPTIONS: Final = "vllm:num_preemptions_total"
ENGINE_TTFT_SECONDS: Final = "vllm:time_to_first_token_seconds"
ENGINE_ITL_SECONDS: Final = "vllm:inter_token_latency_seconds"
ENGINE_E2E_SECONDS: Final = "vllm:e2e_request_latency_seconds"
ENGINE_QUEUE_SECONDS: Final = "vllm:request_queue_time_seconds"
"""Observed when a request ends, like the next three."""
ENGINE_PREFILL_SECONDS: Final = "vllm:request_prefill_time_seconds"
"""Seconds from the start of a request's first prefill chunk to its first token."""
ENGINE_PREFILL_TOKENS: Final = "vllm:request_prefill_kv_computed_tokens"
"""Prompt tokens that the engine computed for a request: neither cached nor transferred."""
ENGINE_DECODE_SECONDS: Final = "vllm:request_decode_time_seconds"
"""Seconds from the first token of a request to its last one."""
ENGINE_ADAPTERS: Final = "vllm:lora_requests_info"
"""LoRA adapters in use, in the labels `running_lora_adapters` and `waiting_lora_adapters` (comma
lists), with `max_lora`. One sample per combination that ever was; its value is the Unix time at
which it last was, so the greatest value is the present one."""

# Exported by the reference engine only: vLLM has no such metric.
ENGINE_HELD: Final = "tandem_engine_held_requests"
"""Finished prompts whose KV is held for a decode engine; a draining prefill pod may stop at 0."""

ENGINE_TIER_LOADED: Final = "tandem_engine_kv_tier_loaded_tokens_total"
"""Tokens whose KV was loaded, by `tier`: `host` or `storage`."""
ENGINE_TIER_STORED: Final = "tandem_engine_kv_tier_stored_tokens_total"
"""Tokens whose KV was written, by `tier`."""
ENGINE_HOST_TIER_BYTES: Final = "tandem_engine_kv_host_tier_bytes"
ENGINE_STORAGE_NOT_LOADED: Final = "tandem_engine_kv_storage_not_loaded_chunks_total"
"""Chunks that were computed although storage might have had them, by `reason`."""
ENGINE_STORAGE_NOT_STORED: Final = "tandem_engine_kv_storage_not_stored_chunks_total"
"""Chunks that were not stored, by `reason`."""
ENGINE_STORAGE_LOAD_SECONDS: Final = "tandem_engine_kv_storage_load_seconds"
ENGINE_STORAGE_LOAD_BYTES: Final = "tandem_engine_kv_storage_load_bytes_total"
ENGINE_STORAGE_BREAKER: Final = "tandem_engine_kv_storage_breaker_state"
"""0 closed, 1 half-open, 2 open: an open one means that the storage failed and is left alone."""
ENGINE_STORAGE_FAILURE: Final = "tandem_engine_kv_storage_failure"
"""1 for the newest failure of the storage, 0 for those before, by the label `message`."""

# Exported by the EPP, read by `tandem demo` and `tandem up`.
EPP_HEALTHY: Final = "tandem_epp_backend_healthy"
EPP_DECISIONS: Final = "tandem_epp_decisions_total"
"""EPP → `tandem status`."""
EPP_PATH_LABEL: Final = "path"
"""Label of EPP_DECISIONS: a `RoutingPath` value, EPP_REFUSED, or `answered`."""
EPP_REFUSED: Final = "refused"
EPP_PEERS: Final = "tandem_epp_peers"
"""Other replicas of the EPP by the state of the connection to them; read by an alert."""
EPP_EJECTED: Final = "tandem_epp_ejected"
"""1 while a backend is ejected because its requests failed; read by alerts, too."""
EPP_WARMING: Final = "tandem_epp_warming_pairs"
"""Pairs of prefill and decode pods whose first hand-off (warm-up) is in progress."""

# Exported by the operator, used by dashboards and alerts.
OPERATOR_RECONCILE_SECONDS: Final = "tandem_operator_reconcile_seconds"
"""Label `loop`: `set` or `endpoint`."""
OPERATOR_RECONCILES: Final = "tandem_operator_reconciles_total"
"""Labels `loop` and `result`: `ok`, `refused`, `unreachable`, `bug`."""
OPERATOR_QUEUE_DEPTH: Final = "tandem_operator_queue_depth"
OPERATOR_API_CALLS: Final = "tandem_operator_api_calls_total"
"""Labels `verb` and `code`."""
OPERATOR_PODS: Final = "tandem_operator_pods"
"""Labels `namespace`, `pool`, `role` and `state`: `pending`, `ready`, `draining`, `failed`."""
OPERATOR_LEADER: Final = "tandem_operator_leader"
"""1 on the replica that holds the Lease, 0 on the others."""


class PromptSource(StrEnum):
    """Where the KV of prompt tokens came from (vLLM's values)."""

    COMPUTED = "local_compute"
    CACHED = "local_cache_hit"
    EXTERNAL = "external_kv_transfer"
