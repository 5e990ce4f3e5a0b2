"""llm-d's plugins and feature gates that have no effect here, and plugins that are refused, each
with the reason.

A plugin is accepted if requests are placed as before without it, and refused if they would not be.
Names are those of llm-d-router 0.10 and of its main branch after it, old ones included.

Of the feature gates, in `featureGates` of the configuration or in `--feature-gates`, `flowControl`
alone changes what the EPP does (`flow_control`): it always does what the others turn on. As in
llm-d the flag's entries follow the configuration's, and the last entry of a gate counts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from .parameters import AnyParameters
from .picker_config import unknown_name
from .plugin_types import Kind, Plugin, RefusedType

_NO_EVICTION: Final = "requests that a backend has are not ended for others"

ALWAYS: Final[Mapping[str, str]] = {
    "core-metrics-extractor": "the EPP always reads the engines' load metrics",
    "disagg-headers-handler": "the EPP always names prefill pods in a header",
    "endpoint-notification-source": "discovery always notifies the EPP of changes",
    "inflight-load-producer": "the EPP always counts requests in flight",
    "k8s-notification-source": "discovery always notifies the EPP of changes",
    "models-data-source": "discovery tells the models of a backend",
    "models-data-extractor": "discovery tells the models of a backend",
    "models-responder": "the EPP answers GET /v1/models itself where backends' models differ",
    "openai-parser": "the EPP always reads bodies of the APIs it knows",
    "anthropic-parser": "the EPP always reads bodies of the APIs it knows",
    "vllmhttp-parser": "the EPP always reads bodies of the APIs it knows",
    "passthrough-parser": "a path that the EPP does not know always passes unread",
    "prefill-header-handler": "the EPP always names prefill pods in a header",
    "single-profile-handler": "one profile serves both phases if only one is listed",
}
"""Plugins whose purpose the EPP always serves."""
LOST: Final[Mapping[str, str]] = {
    "request-attribute-reporter": "the EPP reports no attributes of requests",
    "latency-slo-admitter": "the EPP refuses no request by its predicted latency",
    "sheddable-eviction-filter": _NO_EVICTION,
    "priority-then-time-eviction-order-policy": _NO_EVICTION,
}
"""Plugins whose effect is missing, with the reason."""
ACCEPTED: Final = tuple(
    Plugin(name, kind, AnyParameters, reason)
    for kind, rows in ((Kind.NOT_NEEDED, ALWAYS), (Kind.NO_EFFECT, LOST))
    for name, reason in rows.items()
)
"""Plugins of both kinds, which may be listed."""

_ENCODE: Final = "no pods of their own encode media: the pod that prefills does it"
_MEDIA: Final = "the EPP does not know which pod has encoded which image"
_GPU: Final = "the EPP reads the engines' metrics and none of GPUs or of other exporters"
_ADMIT: Final = "the EPP refuses no request by load"
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


FLOW_CONTROL: Final = "flowControl"
_GATES: Final[Mapping[str, str]] = {
    FLOW_CONTROL: "",
    "haPopulateNonLeaderDatastore": "every replica follows discovery",
    "dataLayer": "the EPP always reads the engines' load metrics",
    "prepareDataPlugins": "the EPP always prepares what scorers need",
}
"""Gate, older ones included → why it has no effect; empty: it has."""
_TRUE: Final = ("1", "t", "true")
_FALSE: Final = ("0", "f", "false")


@dataclass(frozen=True)
class FeatureGate:
    """A gate that is named."""

    name: str
    is_on: bool
    reason: str
    """Why it has no effect; empty: it has."""


def read_gate(text: str) -> FeatureGate:
    """The gate in `name`, `name=true` or `name=false`. Raises ValueError for any other text."""
    name, _, value = text.partition("=")
    if name not in _GATES:
        raise ValueError(unknown_name("feature gate", name, _GATES.keys()))
    value = value.strip().lower() or "true"
    if value not in (*_TRUE, *_FALSE):
        raise ValueError(f"{text!r}: write {name}=true or {name}=false")
    return FeatureGate(name, value in _TRUE, _GATES[name])


def last_entries(texts: Iterable[str]) -> dict[str, FeatureGate]:
    """The entry that counts of each gate in `texts`, by the gate's name. Raises ValueError."""
    return {gate.name: gate for gate in map(read_gate, texts)}
