"""The registry's scorers and filters, and how some of them use other plugins of the
configuration."""

from typing import Any, Final

from tandem_contract.paths import Role

from .conformance import EndpointSelectionFilter
from .filters import LabelFilter, RoleFilter, SelectorFilter, UtilizationFilter
from .label_scorers import ContextLengthFilter, ContextLengthScorer, HeaderLabelScorer
from .latency_parameters import (
    LatencyScorerParameters,
    PredictedLatencyParameters,
    TierParameters,
)
from .llmd_parameters import (
    AGENT_HEADERS,
    ID_HEADER,
    ActiveRequestParameters,
    AgentParameters,
    ContextLengthParameters,
    HeaderLabelParameters,
    LabelParameters,
    LabelSelector,
    LoadAwareParameters,
    NoHitLruParameters,
    PrefixAffinityParameters,
    SessionIdParameters,
    SessionParameters,
    SessionSource,
    TokenLoadParameters,
    TopologyFilterParameters,
    TopologyParameters,
    TopologyScorerParameters,
    UtilizationParameters,
)
from .no_hit_lru import NoHitLruScorer
from .parameters import NoParameters, PrefixScorerParameters
from .picker_config import unknown_name
from .plugin_types import Kind, Listed, Plugin
from .predicted_latency import LatencyScorer, TierFilter
from .prefix_affinity import PrefixAffinityFilter
from .profile import Scorer
from .scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    PrefixCacheScorer,
    QueueScorer,
    RunningRequestsSizeScorer,
    TokenLoadScorer,
)
from .sessions import IdSession, IdSource, Session, SessionFilter, SessionScorer, TokenSession
from .topology import DISTANCES, TopologyFilter, TopologyScorer

_PRODUCERS: Final = ("approx-prefix-cache-producer", "precise-prefix-cache-producer")
_PREDICTED: Final = PredictedLatencyParameters()


def prefix_scorer(parameters: PrefixScorerParameters, listed: Listed) -> Scorer:
    """The scorer of the producer that `parameters` name: bursts, or what is cached. Raises
    ValueError if it is not listed."""
    producer = parameters.prefixMatchInfoProducerName
    if (burst := listed.burst(producer)) is not None:
        return burst
    # Both indexes may answer without being listed under these names.
    if producer and producer not in (*listed.names, *_PRODUCERS):
        raise ValueError(unknown_name("prefixMatchInfoProducerName", producer, listed.names))
    return PrefixCacheScorer(
        parameters.matchLengthWeight, parameters.matchLengthScaleTokens, listed.prefix_tokens
    )


def _affinity_filter(parameters: PrefixAffinityParameters, listed: Listed) -> PrefixAffinityFilter:
    named = PrefixScorerParameters(
        prefixMatchInfoProducerName=parameters.prefixMatchInfoProducerName
    )
    return PrefixAffinityFilter(parameters, prefix_scorer(named, listed))


def _itl_share(listed: Listed) -> float:
    """The share of a target for the ITL that counts."""
    return (listed.parameters(PredictedLatencyParameters) or _PREDICTED).sloBufferFactor


def session_of(parameters: SessionParameters, listed: Listed) -> Session:
    """The kind of sessions that `parameters` stand for. Raises ValueError for an attribute that no
    listed plugin provides."""
    is_prefill = parameters.profileName == listed.prefill_profile
    if parameters.strategy == "encoded_endpoint_header":
        header = parameters.encodedEndpointHeaderConfig.header.strip().lower()
        return TokenSession(header, is_prefill)
    ids = parameters.sessionIdConfig
    sources = [place for source in ids.sources for place in _places(source, listed)]
    return IdSession(
        sources or [IdSource(ID_HEADER)], ids.evictionTtlSeconds, is_prefill=is_prefill
    )


def _places(source: SessionSource, listed: Listed) -> list[IdSource]:
    """Where to look for the ids of `source`, in order."""
    if source.header:
        return [IdSource(source.header.strip().lower())]
    if source.attribute == "agent-identity":
        agents = listed.parameters(AgentParameters)
        if agents is None:
            raise ValueError("attribute agent-identity needs the plugin agent-identity")
        names = (*agents.additionalSessionHeaders, *AGENT_HEADERS)
        return [IdSource(name.strip().lower()) for name in names]
    if source.attribute == "SessionIDDataKey":
        ids = listed.parameters(SessionIdParameters)
        if ids is None:
            raise ValueError("attribute SessionIDDataKey needs the plugin session-id-producer")
        return [IdSource(ids.headerName.strip().lower(), ids.cookieName.strip())]
    raise ValueError(
        f"attribute {source.attribute!r}: use agent-identity, SessionIDDataKey, or a header"
    )


SCORERS: Final[tuple[Plugin[Any], ...]] = (
    Plugin(
        "prefix-cache-scorer", Kind.SCORER, PrefixScorerParameters,
        "prefers backends to which more of the prompt was routed before",
        prefix_scorer,
    ),
    Plugin(
        "active-request-scorer", Kind.SCORER, ActiveRequestParameters,
        "prefers backends with fewer requests in flight",
        lambda p, _: ActiveRequestScorer(p.idleThreshold, p.maxBusyScore),
    ),
    Plugin(
        "token-load-scorer", Kind.SCORER, TokenLoadParameters,
        "prefers backends with fewer prompt tokens to compute",
        lambda p, _: TokenLoadScorer(p.queueThresholdTokens),
    ),
    Plugin(
        "load-aware-scorer", Kind.SCORER, LoadAwareParameters,
        "prefers engines with fewer waiting requests, by their number and not by comparison",
        lambda p, _: LoadAwareScorer(p.threshold),
    ),
    Plugin(
        "queue-scorer", Kind.SCORER, NoParameters,
        "prefers engines with fewer waiting requests",
        lambda *_: QueueScorer(),
    ),
    Plugin(
        "running-requests-size-scorer", Kind.SCORER, NoParameters,
        "prefers engines with fewer running requests",
        lambda *_: RunningRequestsSizeScorer(),
    ),
    Plugin(
        "kv-cache-utilization-scorer", Kind.SCORER, NoParameters,
        "prefers engines with a larger free share of the KV cache",
        lambda *_: KvCacheUtilizationScorer(),
    ),
    Plugin(
        "lora-affinity-scorer", Kind.SCORER, NoParameters,
        "prefers engines that have the request's LoRA adapter, then those with a free slot",
        lambda *_: LoraAffinityScorer(),
    ),
    Plugin(
        "latency-scorer", Kind.SCORER, LatencyScorerParameters,
        "prefers backends by what their predicted latencies leave of the request's targets",
        lambda p, listed: LatencyScorer(p, _itl_share(listed)),
    ),
    Plugin(
        "no-hit-lru-scorer", Kind.SCORER, NoHitLruParameters,
        "sends prompts that no backend caches to each backend in turn",
        lambda p, _: NoHitLruScorer(p.lruSize),
    ),
    Plugin(
        "session-affinity-scorer", Kind.SCORER, SessionParameters,
        "prefers the backend that served the client's session before",
        lambda p, listed: SessionScorer(session_of(p, listed)),
    ),
    Plugin(
        "topology-affinity-scorer", Kind.SCORER, TopologyScorerParameters,
        "prefers prefill pods near the decode pod",
        lambda _, listed: TopologyScorer(
            listed.parameters(TopologyParameters) or TopologyParameters()
        ),
    ),
    Plugin(
        "header-label-affinity-scorer", Kind.SCORER, HeaderLabelParameters,
        "prefers backends whose label has the value of a request header",
        lambda p, _: HeaderLabelScorer(p.headerName.lower(), p.labelKey),
    ),
    Plugin(
        "context-length-aware", Kind.SCORER, ContextLengthParameters,
        "prefers, or keeps, backends whose label has a range with the prompt's length",
        lambda p, _: ContextLengthScorer(p.label),
        filter=lambda p: ContextLengthFilter(p.label) if p.enableFiltering else None,
    ),
)  # fmt: skip
FILTERS: Final[tuple[Plugin[Any], ...]] = (
    Plugin(
        "prefill-filter", Kind.FILTER, NoParameters,
        "keeps backends that may prefill; always active in the prefill profile",
        lambda *_: RoleFilter(Role.PREFILL), phase=Role.PREFILL,
    ),
    Plugin(
        "decode-filter", Kind.FILTER, NoParameters,
        "keeps backends that may decode; always active in the decode profile",
        lambda *_: RoleFilter(Role.DECODE), phase=Role.DECODE,
    ),
    Plugin(
        "label-selector-filter", Kind.FILTER, LabelSelector,
        "keeps backends that a Kubernetes label selector matches",
        lambda p, _: SelectorFilter(p),
    ),
    Plugin(
        "by-label-selector", Kind.FILTER, LabelSelector,
        "older name of label-selector-filter",
        lambda p, _: SelectorFilter(p),
    ),
    Plugin(
        "by-label", Kind.FILTER, LabelParameters,
        "keeps backends by the value of one label",
        lambda p, _: LabelFilter(p.label, frozenset(p.validValues), p.allowsNoLabel),
    ),
    Plugin(
        "utilization-filter", Kind.FILTER, UtilizationParameters,
        "keeps backends whose load is within limits",
        lambda p, _: UtilizationFilter(p.conditions, p.fallbackOnEmpty),
    ),
    Plugin(
        "prefix-cache-affinity-filter", Kind.FILTER, PrefixAffinityParameters,
        "keeps backends that cache most of the prompt, unless they have much more to compute",
        _affinity_filter,
    ),
    Plugin(
        "slo-headroom-tier-filter", Kind.FILTER, TierParameters,
        "keeps backends whose predicted latencies meet the request's targets, if there are any",
        lambda p, listed: TierFilter(p, _itl_share(listed)),
    ),
    Plugin(
        "session-affinity-filter", Kind.FILTER, SessionParameters,
        "keeps the backend that served the client's session before, if there is one",
        lambda p, listed: SessionFilter(session_of(p, listed)),
    ),
    Plugin(
        "topology-affinity-filter", Kind.FILTER, TopologyFilterParameters,
        "keeps prefill pods near the decode pod, if there are any",
        lambda p, listed: TopologyFilter(
            listed.parameters(TopologyParameters) or TopologyParameters(), DISTANCES[p.minAffinity]
        ),
    ),
    Plugin(
        "header-based-testing-filter", Kind.FILTER, NoParameters,
        "for conformance tests of gateways: keeps the backends that the request header"
        " `test-epp-endpoint-selection` names, all without it (llm-d's: none)",
        lambda *_: EndpointSelectionFilter(),
    ),
)  # fmt: skip
