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
_NO_FLOWS: Final = "the EPP has metrics of its own for flow control, tandem_epp_flow_*"

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
             "program_aware_attained_service_tokens"), _NO_FLOWS),
    Missing(("disaggregatedset_strict_header_no_match_total",
             "disaggregatedset_revision_gating_share"), "that plugin is refused"),
    Missing(("flow_control_*",), _NO_FLOWS, "to scale, use `tandem_epp_flow_model_requests`,"
            " `llm_d_epp_average_queue_size` or `llm_d_epp_request_running`"),
    Missing(("inflight_tokens",), "each replica of the EPP counts what all have placed"),
    Missing(
        ("extproc_streams_inflight", "extproc_stream_duration_seconds", "extproc_streams_total"),
        "off by default in llm-d", "Envoy's statistics of ext_proc, `tandem_epp_faults_total`",
    ),
    Missing(("moriio_dns_*",), "of a connector that is not supported"),
)  # fmt: skip
