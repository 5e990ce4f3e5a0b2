"""llm-d's plugins that have no effect here, and those that are refused, each with the reason.

A plugin is accepted if requests are placed as before without it, and refused if they would not be.
Names are those of llm-d-router 0.10 and of its main branch after it, old ones included.
"""

from collections.abc import Mapping
from typing import Final

from .parameters import AnyParameters
from .plugin_types import AcceptedType, RefusedType

NOT_BUILT: Final = "the EPP has no flow control: it queues and refuses no request by load"


def _always(type_name: str, purpose: str) -> AcceptedType[AnyParameters]:
    return AcceptedType(type_name=type_name, parameters=AnyParameters, help=purpose)


def _lost(type_name: str, reason: str = NOT_BUILT) -> AcceptedType[AnyParameters]:
    return AcceptedType(type_name=type_name, parameters=AnyParameters, help=reason, is_lost=True)


ACCEPTED: Final = (
    _always("core-metrics-extractor", "the EPP always reads the engines' load metrics"),
    _always("disagg-headers-handler", "the EPP always names prefill pods in a header"),
    _always("endpoint-notification-source", "discovery always notifies the EPP of changes"),
    _always("inflight-load-producer", "the EPP always counts requests in flight"),
    _always("k8s-notification-source", "discovery always notifies the EPP of changes"),
    _always("models-data-source", "discovery tells the models of a backend"),
    _always("models-data-extractor", "discovery tells the models of a backend"),
    _always(
        "models-responder", "the EPP answers GET /v1/models itself where backends' models differ"
    ),
    _always("openai-parser", "the EPP always reads bodies of the APIs it knows"),
    _always("anthropic-parser", "the EPP always reads bodies of the APIs it knows"),
    _always("vllmhttp-parser", "the EPP always reads bodies of the APIs it knows"),
    _always("passthrough-parser", "a path that the EPP does not know always passes unread"),
    _always("prefill-header-handler", "the EPP always names prefill pods in a header"),
    _always("single-profile-handler", "one profile serves both phases if only one is listed"),
    _lost("request-attribute-reporter", "the EPP reports no attributes of requests"),
    _lost("global-strict-fairness-policy"),
    _lost("round-robin-fairness-policy"),
    _lost("program-aware-fairness"),
    _lost("fcfs-ordering-policy"),
    _lost("edf-ordering-policy"),
    _lost("slo-deadline-ordering-policy"),
    _lost("static-usage-limit-policy"),
    _lost("priority-holdback-policy"),
    _lost("soft-reflective-ceiling-policy"),
    _lost("sheddable-eviction-filter"),
    _lost("priority-then-time-eviction-order-policy"),
    _lost("concurrency-detector"),
    _lost("utilization-detector"),
)
"""Plugins that may be listed and have no effect."""

_ENCODE: Final = "no pods of their own encode media: the pod that prefills does it"
_MEDIA: Final = "the EPP does not know which pod has encoded which image"
_GPU: Final = "the EPP reads the engines' metrics and none of GPUs or of other exporters"
_ADMIT: Final = "the EPP refuses no request by load"
_PREDICT: Final = "the EPP calls no latency predictor; its own cost predicts"
_CLUSTERS: Final = "an EPP serves one cluster"

REFUSED: Final[Mapping[str, RefusedType]] = {
    "encode-filter": RefusedType(_ENCODE, "prefill-filter"),
    "always-disagg-multimodal-decider": RefusedType(_ENCODE, "always-disagg-pd-decider"),
    "mm-embeddings-cache-producer": RefusedType(_MEDIA, "precise-prefix-cache-producer"),
    "mm-embeddings-cache-scorer": RefusedType(_MEDIA, "prefix-cache-scorer"),
    "dcgm-data-source": RefusedType(_GPU, "metrics-data-source"),
    "dcgm-extractor": RefusedType(_GPU, "core-metrics-extractor"),
    "endpoint-attribute-filter": RefusedType(_GPU, "utilization-filter"),
    "endpoint-attribute-scorer": RefusedType(_GPU, "kv-cache-utilization-scorer"),
    "probabilistic-admitter": RefusedType(_ADMIT, "load-aware-scorer"),
    "latency-slo-admitter": RefusedType(_ADMIT, "predicted-cost"),
    "predicted-latency-producer": RefusedType(_PREDICT, "predicted-cost"),
    "latency-scorer": RefusedType(_PREDICT, "predicted-cost"),
    "slo-headroom-tier-filter": RefusedType(_PREDICT, "predicted-cost"),
    "prefix-cache-affinity-filter": RefusedType(
        "no filter weighs cached prefixes against waiting; predicted-cost does",
        "prefix-cache-scorer",
    ),
    "header-profile-handler": RefusedType(
        "profiles belong to phases, and no header chooses them", "disagg-profile-handler"
    ),
    "thunder-agent": RefusedType(
        "the EPP has no queue in which sessions wait for room", "session-affinity-scorer"
    ),
    "outlen-bucket": RefusedType(
        "requests are not classed by the length that their answers will have", "predicted-cost"
    ),
    "p2p-source-producer": RefusedType(
        "prompts are not pulled from a third pod", "prefix-cache-scorer"
    ),
    "disaggregatedset-rollout-screener": RefusedType(
        "pods pair by their label tandem.dev/kv-compat: give each revision its own",
        "label-selector-filter",
    ),
    "file-discovery": RefusedType(
        "backends come from `backends` in this file, or from the cluster", "metrics-data-source"
    ),
    "multicluster-file-discovery": RefusedType(_CLUSTERS, "metrics-data-source"),
    "multicluster-metrics-data-source": RefusedType(_CLUSTERS, "metrics-data-source"),
    "multicluster-metrics-extractor": RefusedType(_CLUSTERS, "core-metrics-extractor"),
    "multicluster-session-affinity-filter": RefusedType(_CLUSTERS, "session-affinity-filter"),
    "multicluster-kv-cache-utilization-scorer": RefusedType(
        _CLUSTERS, "kv-cache-utilization-scorer"
    ),
    "multicluster-prefix-cache-scorer": RefusedType(_CLUSTERS, "prefix-cache-scorer"),
    "multicluster-queue-scorer": RefusedType(_CLUSTERS, "queue-scorer"),
    "multicluster-approx-prefix-cache-producer": RefusedType(
        _CLUSTERS, "approx-prefix-cache-producer"
    ),
    "vllmgrpc-parser": RefusedType("the EPP reads HTTP with JSON only", "vllmhttp-parser"),
    "sglanghttp-parser": RefusedType("the EPP does not read SGLang's own API", "openai-parser"),
    "vertexai-parser": RefusedType("the EPP does not read Vertex AI's API", "openai-parser"),
}
"""Plugins that an EPP does not start with."""
