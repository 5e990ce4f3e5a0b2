"""The registry's scorers and filters, and how some of them use other plugins of the
configuration."""

from typing import Any, Final

from tandem_contract.paths import Role

from .conformance import EndpointSelectionFilter
from .filters import LabelFilter, RoleFilter, SelectorFilter, UtilizationFilter
from .label_scorers import ContextLengthFilter, ContextLengthScorer, HeaderLabelScorer
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
from .plugin_types import FilterType, Listed, ScorerType
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


SCORERS: Final[tuple[ScorerType[Any], ...]] = (
    ScorerType(
        type_name="prefix-cache-scorer",
        factory=prefix_scorer,
        parameters=PrefixScorerParameters,
        help="prefers backends to which more of the prompt was routed before",
    ),
    ScorerType(
        type_name="active-request-scorer",
        factory=lambda p, _: ActiveRequestScorer(p.idleThreshold, p.maxBusyScore),
        parameters=ActiveRequestParameters,
        help="prefers backends with fewer requests in flight",
    ),
    ScorerType(
        type_name="token-load-scorer",
        factory=lambda p, _: TokenLoadScorer(p.queueThresholdTokens),
        parameters=TokenLoadParameters,
        help="prefers backends with fewer prompt tokens to compute",
    ),
    ScorerType(
        type_name="load-aware-scorer",
        factory=lambda p, _: LoadAwareScorer(p.threshold),
        parameters=LoadAwareParameters,
        help="prefers engines with fewer waiting requests, by their number and not by comparison",
    ),
    ScorerType(
        type_name="queue-scorer",
        factory=lambda *_: QueueScorer(),
        parameters=NoParameters,
        help="prefers engines with fewer waiting requests",
    ),
    ScorerType(
        type_name="running-requests-size-scorer",
        factory=lambda *_: RunningRequestsSizeScorer(),
        parameters=NoParameters,
        help="prefers engines with fewer running requests",
    ),
    ScorerType(
        type_name="kv-cache-utilization-scorer",
        factory=lambda *_: KvCacheUtilizationScorer(),
        parameters=NoParameters,
        help="prefers engines with a larger free share of the KV cache",
    ),
    ScorerType(
        type_name="lora-affinity-scorer",
        factory=lambda *_: LoraAffinityScorer(),
        parameters=NoParameters,
        help="prefers engines that have the request's LoRA adapter, then those with a free slot",
    ),
    ScorerType(
        type_name="no-hit-lru-scorer",
        factory=lambda p, _: NoHitLruScorer(p.lruSize),
        parameters=NoHitLruParameters,
        help="sends prompts that no backend caches to each backend in turn",
    ),
    ScorerType(
        type_name="session-affinity-scorer",
        factory=lambda p, listed: SessionScorer(session_of(p, listed)),
        parameters=SessionParameters,
        help="prefers the backend that served the client's session before",
    ),
    ScorerType(
        type_name="topology-affinity-scorer",
        factory=lambda _, listed: TopologyScorer(
            listed.parameters(TopologyParameters) or TopologyParameters()
        ),
        parameters=TopologyScorerParameters,
        help="prefers prefill pods near the decode pod",
    ),
    ScorerType(
        type_name="header-label-affinity-scorer",
        factory=lambda p, _: HeaderLabelScorer(p.headerName.lower(), p.labelKey),
        parameters=HeaderLabelParameters,
        help="prefers backends whose label has the value of a request header",
    ),
    ScorerType(
        type_name="context-length-aware",
        factory=lambda p, _: ContextLengthScorer(p.label),
        filter=lambda p: ContextLengthFilter(p.label) if p.enableFiltering else None,
        parameters=ContextLengthParameters,
        help="prefers, or keeps, backends whose label has a range with the prompt's length",
    ),
)
FILTERS: Final[tuple[FilterType[Any], ...]] = (
    FilterType(
        type_name="prefill-filter",
        factory=lambda *_: RoleFilter(Role.PREFILL),
        parameters=NoParameters,
        phase=Role.PREFILL,
        help="keeps backends that may prefill; always active in the prefill profile",
    ),
    FilterType(
        type_name="decode-filter",
        factory=lambda *_: RoleFilter(Role.DECODE),
        parameters=NoParameters,
        phase=Role.DECODE,
        help="keeps backends that may decode; always active in the decode profile",
    ),
    FilterType(
        type_name="label-selector-filter",
        factory=lambda p, _: SelectorFilter(p),
        parameters=LabelSelector,
        help="keeps backends that a Kubernetes label selector matches",
    ),
    FilterType(
        type_name="by-label-selector",
        factory=lambda p, _: SelectorFilter(p),
        parameters=LabelSelector,
        help="older name of label-selector-filter",
    ),
    FilterType(
        type_name="by-label",
        factory=lambda p, _: LabelFilter(p.label, frozenset(p.validValues), p.allowsNoLabel),
        parameters=LabelParameters,
        help="keeps backends by the value of one label",
    ),
    FilterType(
        type_name="utilization-filter",
        factory=lambda p, _: UtilizationFilter(p.conditions, p.fallbackOnEmpty),
        parameters=UtilizationParameters,
        help="keeps backends whose load is within limits",
    ),
    FilterType(
        type_name="session-affinity-filter",
        factory=lambda p, listed: SessionFilter(session_of(p, listed)),
        parameters=SessionParameters,
        help="keeps the backend that served the client's session before, if there is one",
    ),
    FilterType(
        type_name="topology-affinity-filter",
        factory=lambda p, listed: TopologyFilter(
            listed.parameters(TopologyParameters) or TopologyParameters(),
            DISTANCES[p.minAffinity],
        ),
        parameters=TopologyFilterParameters,
        help="keeps prefill pods near the decode pod, if there are any",
    ),
    FilterType(
        type_name="header-based-testing-filter",
        factory=lambda *_: EndpointSelectionFilter(),
        parameters=NoParameters,
        help="for conformance tests of gateways: keeps the backends that the request header "
        "`test-epp-endpoint-selection` names, all without it (llm-d's: none)",
    ),
)
