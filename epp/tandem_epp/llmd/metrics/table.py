"""The metrics of llm-d's EPP (llm-d-router 0.10): which of them are exported, and why not others.

Names are those after `llm_d_epp_`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .families import (
    ATTEMPTS,
    CACHED,
    DECISIONS,
    DURATION,
    ERRORS,
    HIT_RATIO,
    INPUT,
    PREDICTED,
    REWRITES,
    RUNNING,
    TOTAL,
    TTFT,
    Names,
)
from .flow import BYTES, SIZE
from .pool import IN_FLIGHT, INFO, QUEUE, READY, STATISTICS


@dataclass(frozen=True, slots=True)
class Exported:
    """A metric that means the same here."""

    names: Names
    ours: str
    """Tandem's own metric for it; empty: there is none."""
    difference: str = ""
    """What differs; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Metrics that are not exported."""

    names: tuple[str, ...]
    reason: str
    ours: str = ""
    """What to read instead."""


_HEAD_ONLY: Final = "the EPP does not read bodies of answers"

EXPORTED: Final[Sequence[Exported]] = (
    Exported(TOTAL, "tandem_epp_decisions_total", "requests without a model are left out"),
    Exported(ERRORS, "tandem_epp_decisions_total, tandem_epp_outcomes_total"),
    Exported(DURATION, "", "begins with the complete body, not with the headers"),
    Exported(INPUT, "tandem_epp_prompt_tokens_total", "estimated where the answer does not tell"),
    Exported(CACHED, "tandem_epp_cached_prompt_tokens_total"),
    Exported(RUNNING, "tandem_epp_in_flight"),
    Exported(IN_FLIGHT, "tandem_epp_in_flight"),
    Exported(TTFT, "", "streams that a sidecar answers; begins with the complete body"),
    Exported(PREDICTED, "tandem_epp_ttft_prediction_error"),
    *(Exported(statistic.mean, "the engines' own") for statistic in STATISTICS),
    *(Exported(statistic.spread, "the engines' own") for statistic in STATISTICS),
    Exported(READY, "tandem_epp_backend_healthy"),
    Exported(QUEUE, "the engines' own"),
    Exported(ATTEMPTS, "tandem_epp_decisions_total"),
    Exported(DECISIONS, "tandem_epp_decisions_total"),
    Exported(REWRITES, "", "requests that were placed, and not those that name the target"),
    Exported(HIT_RATIO, "tandem_epp_prefix_hit_ratio"),
    Exported(
        SIZE,
        "tandem_epp_flow_held, tandem_epp_flow_model_requests",
        "both models are the one that serves",
    ),
    Exported(BYTES, "tandem_epp_flow_held_bytes", "both models are the one that serves"),
    Exported(INFO, "", "commit is empty, build_ref is Tandem's version"),
)

MISSING: Final[Sequence[Missing]] = (
    Missing(
        ("request_size_bytes", "response_size_bytes"),
        "the EPP does not add up sizes of bodies",
        "Envoy's `envoy_cluster_upstream_rq_body_size`",
    ),
    Missing(
        ("request_output_tokens", "request_ntpot_seconds", "request_streaming_tpot_seconds",
         "request_streaming_itl_seconds"),
        _HEAD_ONLY,
        "`vllm:request_generation_tokens`, `vllm:request_time_per_output_token_seconds`,"
        " `vllm:inter_token_latency_seconds`",
    ),
    Missing(
        ("scheduler_e2e_duration_seconds", "request_processing_duration_seconds",
         "response_processing_duration_seconds"),
        "measured over other parts of the work",
        "`tandem_epp_decision_seconds`: parsing, hashing, choosing and signing",
    ),
    Missing(("plugin_duration_seconds", "plugin_data_scope_violations_total"),
            "one cost is computed, not one plugin after the other"),
    Missing(("datalayer_poll_errors_total", "datalayer_extract_errors_total"),
            "counted as the state of the backend", "`tandem_epp_backend_healthy`,"
            " `tandem_epp_scrape_age_seconds`"),
    Missing(("prefix_indexer_size",), "the index is measured in bytes, not in entries",
            "`tandem_epp_prefix_index_bytes`"),
    Missing(("prefix_indexer_hit_bytes",), "matches are counted in tokens",
            "`tandem_epp_cached_prompt_tokens_total`"),
    Missing(("kv_cache_*",), "of llm-d's library for KV events",
            "`tandem_epp_kv_events_total`, `tandem_epp_kv_index_bytes`"),
    Missing(("encoder_cache_queries_total", "encoder_cache_hits_total", "encoder_cache_hit_ratio"),
            "no pods of their own encode media"),
    Missing(
        ("inference_request_metric", "request_ttft_prediction_duration_seconds",
         "request_predicted_tpot_seconds", "request_tpot_prediction_duration_seconds",
         "request_slo_violation_total"),
        "no latency predictor is called, and requests have no SLO",
        "`tandem_epp_ttft_prediction_error`",
    ),
    Missing(("pd_decision_total",), "of a handler that llm-d deprecates",
            "`llm_d_epp_disagg_decision_total`"),
    Missing(("program_aware_jains_fairness_index", "program_aware_avg_wait_time_milliseconds",
             "program_aware_attained_service_tokens"), "shares are not summed up by tenant",
            "`tandem_epp_flow_seconds`: waits by priority"),
    Missing(("disaggregatedset_strict_header_no_match_total",
             "disaggregatedset_revision_gating_share"), "that plugin is refused"),
    Missing(
        ("flow_control_request_queue_duration_seconds", "flow_control_requests_total"),
        "llm-d counts all requests, also those that do not wait",
        "`tandem_epp_flow_seconds`: those that waited and went;"
        " `tandem_epp_flow_ended_total`: those that waited or were refused, by result",
    ),
    Missing(
        ("flow_control_pool_saturation", "flow_control_stale_endpoints"),
        "a pod has room or not, by what it would take, and there is no one share",
        "`tandem_epp_flow_held`: above 0 while pods are saturated; `tandem_epp_scrape_age_seconds`",
    ),
    Missing(
        ("flow_control_dispatch_cycle_duration_seconds",
         "flow_control_request_enqueue_duration_seconds"),
        "there is no cycle: each change lets the next request go", "`tandem_epp_decision_seconds`",
    ),
    Missing(
        ("flow_control_capacity_utilization_*", "flow_control_global_capacity_utilization_*"),
        "limits are those of all replicas",
        "the sum of `tandem_epp_flow_held` or `tandem_epp_flow_held_bytes`, over the limit",
    ),
    Missing(
        ("flow_control_revocations_*", "flow_control_revocation_confirmation_seconds",
         "flow_control_reclaim_target", "flow_control_pending_reclaim"),
        "requests that a backend has are not ended for others",
    ),
    Missing(("inflight_tokens",), "each replica of the EPP counts what all have placed"),
    Missing(
        ("extproc_streams_inflight", "extproc_stream_duration_seconds", "extproc_streams_total"),
        "off by default in llm-d", "Envoy's statistics of ext_proc, `tandem_epp_faults_total`",
    ),
    Missing(("moriio_dns_*",), "of a connector that is not supported"),
)  # fmt: skip
