"""Names of the metrics two components share: who exports each is said in its line.

The seed's six keep its names exactly; counters are listed with the `_total` that Prometheus sees.
"""

from typing import Final

# Exported by the sidecar (seed 000).
REQUESTS: Final = "disaggregated_requests_total"
PREFILL_SECONDS: Final = "disaggregated_prefill_duration_seconds"
DECODE_SECONDS: Final = "disaggregated_decode_duration_seconds"
KV_TRANSFER_SECONDS: Final = "disaggregated_kv_transfer_duration_seconds"
FALLBACKS: Final = "disaggregated_fallback_total"
ERRORS: Final = "disaggregated_errors_total"

# Exported by every engine under vLLM's names, read by the EPP, the demo and `tandem status`.
ENGINE_RUNNING: Final = "vllm:num_requests_running"
ENGINE_WAITING: Final = "vllm:num_requests_waiting"
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
ENGINE_KV_EXPIRED: Final = "vllm:nixl_num_kv_expired_reqs_total"
