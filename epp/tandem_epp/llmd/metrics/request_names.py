"""Names, labels and help texts of the metrics of requests."""

from typing import Final

from .families import Names

_MODEL: Final = ("model_name", "target_model_name")
_FLOW: Final = (*_MODEL, "fairness_id", "priority")
_PLUGIN: Final = ("plugin_name", "plugin_type")
_OBJECTIVE: Final = "inference_objective_"

TOTAL: Final = Names(
    "request_total", _FLOW, "Requests that name a model and were placed.",
    f"{_OBJECTIVE}request_total", (*_MODEL, "priority"),
)  # fmt: skip
ERRORS: Final = Names(
    "request_error_total", (*_FLOW, "error_code"),
    "Requests that the EPP refused, by reason, and answers with 4xx and 5xx (ModelServerError).",
    f"{_OBJECTIVE}request_error_total", (*_MODEL, "error_code"),
)  # fmt: skip
RUNNING: Final = Names(
    "request_running", _FLOW, "Requests that were placed and have not ended.",
    f"{_OBJECTIVE}running_requests", ("model_name",),
)  # fmt: skip
DURATION: Final = Names(
    "request_duration_seconds", _FLOW, "Seconds from the request's complete body to its end.",
    f"{_OBJECTIVE}request_duration_seconds", _MODEL,
)  # fmt: skip
TTFT: Final = Names(
    "request_ttft_seconds", (*_FLOW, "streaming"),
    "Seconds from the request's complete body to the first token of a stream.",
)  # fmt: skip
INPUT: Final = Names(
    "request_input_tokens", _FLOW,
    "Prompt tokens, as the engine counted them where the answer's head tells, else as estimated.",
    f"{_OBJECTIVE}input_tokens", _MODEL,
)  # fmt: skip
CACHED: Final = Names(
    "request_cached_tokens", _FLOW, "Prompt tokens read from the engine's cache, where it tells.",
    f"{_OBJECTIVE}prompt_cached_tokens", _MODEL,
)  # fmt: skip
PREDICTED: Final = Names(
    "request_predicted_ttft_seconds", (*_PLUGIN, *_MODEL),
    "Predicted seconds to the first token; see tandem_epp_ttft_prediction_error.",
    f"{_OBJECTIVE}request_predicted_ttft_seconds", _MODEL,
)  # fmt: skip
ATTEMPTS: Final = Names(
    "scheduler_attempts_total",
    ("status", "target_model_name", "endpoint_name", "namespace", "port"),
    "Choices of pods, by the decode pod that was chosen; status failure: no pod could be.",
    "inference_extension_scheduler_attempts_total",
    ("status", "target_model_name", "pod_name", "namespace", "port"),
)
DECISIONS: Final = Names(
    "disagg_decision_total", (*_PLUGIN, "model_name", "decision_type"),
    "Placed requests, by whether prefill and decode run on two pods.",
    "llm_d_inference_scheduler_disagg_decision_total", ("model_name", "decision_type"),
)  # fmt: skip
REWRITES: Final = Names(
    "model_rewrite_decisions_total", ("model_rewrite_name", "model_name", "target_model"),
    "Placed requests that another model serves, because an InferenceModelRewrite says so.",
    "inference_extension_model_rewrite_decisions_total",
    ("model_rewrite_name", "model_name", "target_model"),
)  # fmt: skip
HIT_RATIO: Final = Names(
    "prefix_indexer_hit_ratio", _PLUGIN,
    "Share of a prompt that the prefix index found on the decode pod.",
    "inference_extension_prefix_indexer_hit_ratio", (),
)  # fmt: skip
