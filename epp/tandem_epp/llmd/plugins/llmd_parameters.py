"""Parameters of llm-d's plugins that compare labels, load and sessions: names and defaults are
llm-d's.

The Meta of a field gives its range and its line in the docs. A Struct raises ValueError for values
that contradict each other; the configuration adds file and line.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, field

from .parameters import Strict

CONTEXT_LENGTH: Final = "llm-d.ai/context-length-range"
"""Label with the range of prompts that a pod is for."""


class LabelParameters(Strict, frozen=True):
    """Parameters of by-label."""

    label: Annotated[str, Meta(min_length=1, description="the label's key")]
    validValues: Annotated[  # noqa: N815 - llm-d's name
        tuple[str, ...], Meta(description="values of pods that stay")
    ] = ()
    allowsNoLabel: Annotated[  # noqa: N815
        bool, Meta(description="whether pods without the label stay")
    ] = False

    def __post_init__(self) -> None:
        if not self.validValues and not self.allowsNoLabel:
            raise ValueError("no pod can stay: give validValues, or allowsNoLabel: true")


class Operator(StrEnum):
    """How a label selector compares."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class Expression(Strict, frozen=True):
    """A requirement of a label selector."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        has_list = self.operator in (Operator.IN, Operator.NOT_IN)
        if has_list != bool(self.values):
            need = "needs" if has_list else "takes no"
            raise ValueError(f"{self.operator} {need} values")


class LabelSelector(Strict, frozen=True):
    """Parameters of label-selector-filter: a Kubernetes label selector."""

    matchLabels: Annotated[  # noqa: N815 - Kubernetes' name
        dict[str, str], Meta(description="labels that a pod must have")
    ] = field(default_factory=dict)
    matchExpressions: Annotated[  # noqa: N815
        tuple[Expression, ...],
        Meta(description="`key`, `operator` (In, NotIn, Exists, DoesNotExist), `values`"),
    ] = ()


class Metric(StrEnum):
    """A figure of utilization-filter."""

    ACTIVE = "active-requests"
    RUNNING = "running-requests"
    WAITING = "waiting-queue"
    KV_USAGE = "kv-cache-utilization"


class Condition(Strict, frozen=True):
    """A limit of utilization-filter."""

    metric: Metric
    maxValue: Annotated[float, Meta(ge=0)]  # noqa: N815 - llm-d's name

    def __post_init__(self) -> None:
        if self.metric is Metric.KV_USAGE and self.maxValue > 1:
            raise ValueError(f"maxValue of {self.metric} is a share, at most 1")


class UtilizationParameters(Strict, frozen=True):
    """Parameters of utilization-filter."""

    conditions: Annotated[
        tuple[Condition, ...],
        Meta(
            min_length=1,
            description="`metric` (active-requests, running-requests, waiting-queue, "
            "kv-cache-utilization) and `maxValue`; all must hold",
        ),
    ]
    fallbackOnEmpty: Annotated[  # noqa: N815 - llm-d's name
        bool, Meta(description="whether all stay if none would")
    ] = False
    inFlightLoadProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class LoadAwareParameters(Strict, frozen=True):
    """Parameters of load-aware-scorer."""

    threshold: Annotated[int, Meta(ge=1, description="waiting requests that score 0")] = 128


class ActiveRequestParameters(Strict, frozen=True):
    """Parameters of active-request-scorer."""

    idleThreshold: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=0, description="requests up to which a backend scores 1")
    ] = 0
    maxBusyScore: Annotated[  # noqa: N815
        float, Meta(ge=0, le=1, description="best score above that")
    ] = 1.0
    requestTimeout: Annotated[  # noqa: N815
        str, Meta(description="ignored, as in llm-d: requests count until they end")
    ] = ""
    inFlightLoadProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class TokenLoadParameters(Strict, frozen=True):
    """Parameters of token-load-scorer."""

    queueThresholdTokens: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=1, description="tokens that score 0")
    ] = 4_194_304
    inFlightLoadProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class PrefixAffinityParameters(Strict, frozen=True):
    """Parameters of prefix-cache-affinity-filter."""

    affinityThreshold: Annotated[  # noqa: N815 - llm-d's name
        float, Meta(le=1, description="share of the prompt that a pod caches to be kept; 0: off")
    ] = 0.8
    explorationProbability: Annotated[  # noqa: N815
        float, Meta(ge=0, le=1, description="share of the requests for which all pods are kept")
    ] = 0.0
    maxTTFTPenaltyMs: Annotated[  # noqa: N815
        float,
        Meta(ge=0, description="milliseconds by which kept pods may be behind; 0: any number"),
    ] = 18_000.0
    maxTokensInFlightPenalty: Annotated[  # noqa: N815
        int, Meta(ge=0, description="the same in prompt tokens, of older versions; 0: any number")
    ] = 0
    ttftSource: Annotated[  # noqa: N815
        Literal["prefillThroughput", "latencyPredictor"],
        Meta(
            description="what milliseconds are made of: `prefillThroughput`, tokens in flight;"
            " `latencyPredictor`, the EPP's own prediction for this prompt"
        ),
    ] = "prefillThroughput"
    peakPrefillThroughput: Annotated[  # noqa: N815
        float,
        Meta(
            ge=0,
            description="prompt tokens per second of a pod, for `prefillThroughput`; 0 only where"
            " no milliseconds are compared",
        ),
    ] = 15_928.0
    prefixMatchInfoProducerName: Annotated[  # noqa: N815
        str, Meta(description="a burst-prefix-cache-producer, or the prefix index")
    ] = ""
    latencyPredictionInfoProducerName: Annotated[  # noqa: N815
        str, Meta(description="ignored")
    ] = ""
    inFlightLoadProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815

    def __post_init__(self) -> None:
        is_needed = self.ttftSource == "prefillThroughput" and self.maxTTFTPenaltyMs > 0
        if is_needed and not self.peakPrefillThroughput:
            raise ValueError(
                "peakPrefillThroughput must be above 0 where ttftSource is prefillThroughput and"
                " maxTTFTPenaltyMs is not 0"
            )


class NoHitLruParameters(Strict, frozen=True):
    """Parameters of no-hit-lru-scorer."""

    lruSize: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=1, description="backends whose turn is remembered")
    ] = 1024
    prefixMatchInfoProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815
    prefixPluginType: Annotated[str, Meta(description="ignored, as in llm-d")] = ""  # noqa: N815
    prefixPluginName: Annotated[str, Meta(description="ignored, as in llm-d")] = ""  # noqa: N815


class BurstParameters(Strict, frozen=True):
    """Parameters of burst-prefix-cache-producer."""

    windowDurationMs: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=1, le=10_000, description="milliseconds of a window; no request waits for it")
    ] = 100
    maxPerReplica: Annotated[  # noqa: N815
        int, Meta(ge=-1, description="requests of one prompt per pod; -1: any number")
    ] = -1
    blockSizeTokens: Annotated[  # noqa: N815
        int, Meta(ge=1, description="tokens of a block of `minColocateBlocks`")
    ] = 64
    maxPrefixTokensToMatch: Annotated[  # noqa: N815
        int, Meta(ge=0, description="tokens in which prompts are compared; 0: all")
    ] = 0
    minColocateBlocks: Annotated[  # noqa: N815
        int,
        Meta(ge=0, description="blocks in which prompts that stay together begin alike; 0: all"),
    ] = 0
    maxBatchSize: Annotated[  # noqa: N815
        int, Meta(ge=-1, description="requests of a window that are kept together; -1: any number")
    ] = 1000
    balanceBy: Annotated[  # noqa: N815
        Literal["requests", "tokens"], Meta(description="load of a window: `requests` or `tokens`")
    ] = "requests"

    def __post_init__(self) -> None:
        if 0 < self.maxPrefixTokensToMatch < self.blockSizeTokens:
            raise ValueError("maxPrefixTokensToMatch is less than one block")
        if self.maxPerReplica == 0 or self.maxBatchSize == 0:
            raise ValueError("maxPerReplica and maxBatchSize are at least 1, or -1")


class TopologyParameters(Strict, frozen=True):
    """Parameters of topology-extractor."""

    hostname: Annotated[
        str, Meta(description="label of the host; a pod without it has its node's name")
    ] = "kubernetes.io/hostname"
    rack: Annotated[str, Meta(description="label of the rack")] = "topology.kubernetes.io/rack"
    zone: Annotated[str, Meta(description="label of the zone")] = "topology.kubernetes.io/zone"
    region: Annotated[str, Meta(description="label of the region")] = (
        "topology.kubernetes.io/region"
    )


class Level(StrEnum):
    """How near prefill pods must be."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    REGION = "region"


class TopologyFilterParameters(Strict, frozen=True):
    """Parameters of topology-affinity-filter."""

    minAffinity: Annotated[  # noqa: N815 - llm-d's name
        Level, Meta(description="`host`, `rack`, `zone` or `region`")
    ] = Level.HOST
    topologyProducerName: Annotated[  # noqa: N815
        str, Meta(description="ignored: the first topology-extractor counts")
    ] = ""


class TopologyScorerParameters(Strict, frozen=True):
    """Parameters of topology-affinity-scorer."""

    topologyProducerName: Annotated[  # noqa: N815 - llm-d's name
        str, Meta(description="ignored: the first topology-extractor counts")
    ] = ""


class HeaderLabelParameters(Strict, frozen=True):
    """Parameters of header-label-affinity-scorer."""

    headerName: Annotated[  # noqa: N815 - llm-d's name
        str, Meta(min_length=1, description="request header")
    ]
    labelKey: Annotated[str, Meta(min_length=1, description="label to compare with")]  # noqa: N815


class ContextLengthParameters(Strict, frozen=True):
    """Parameters of context-length-aware."""

    label: Annotated[
        str, Meta(min_length=1, description="label with a range of tokens, `min-max`")
    ] = CONTEXT_LENGTH
    enableFiltering: Annotated[  # noqa: N815 - llm-d's name
        bool, Meta(description="whether pods with another range are ruled out")
    ] = False


TOKEN_HEADER: Final = "x-session-token"  # noqa: S105 - a name
ID_HEADER: Final = "x-session-id"
AGENT_HEADERS: Final = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)
"""Headers in which agents name their session, in llm-d's order."""


class TokenHeader(Strict, frozen=True):
    """Where a token travels."""

    header: str = TOKEN_HEADER


class SessionSource(Strict, frozen=True):
    """A place of session ids."""

    header: str = ""
    attribute: str = ""
    producer: str = ""

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.attribute):
            raise ValueError("give either header or attribute")


class SessionIds(Strict, frozen=True):
    """How clients name sessions, and how long they are remembered."""

    sources: tuple[SessionSource, ...] = ()
    evictionTtlSeconds: Annotated[float, Meta(gt=0)] = 300.0  # noqa: N815 - llm-d's name
    evictionSweepSeconds: Annotated[float, Meta(gt=0)] = 10.0  # noqa: N815


class SessionParameters(Strict, frozen=True):
    """Parameters of session-affinity-scorer and session-affinity-filter."""

    strategy: Annotated[
        Literal["encoded_endpoint_header", "session_id"],
        Meta(
            description="`encoded_endpoint_header`: responses name the pod in a header that the "
            "client sends back; `session_id`: the client names its session"
        ),
    ] = "encoded_endpoint_header"
    encodedEndpointHeaderConfig: Annotated[  # noqa: N815 - llm-d's name
        TokenHeader, Meta(description="`header` (x-session-token)")
    ] = TokenHeader()
    sessionIdConfig: Annotated[  # noqa: N815
        SessionIds,
        Meta(
            description="`sources`: `header` (x-session-id), or `attribute` agent-identity or "
            "SessionIDDataKey with its plugin listed; the first that is not empty counts. "
            "`evictionTtlSeconds` (300): idle sessions are forgotten; `evictionSweepSeconds` is "
            "ignored: the age is checked at each use"
        ),
    ] = SessionIds()
    profileName: Annotated[  # noqa: N815
        str, Meta(description="the prefill profile, for sessions of prefill pods")
    ] = ""


class SessionIdParameters(Strict, frozen=True):
    """Parameters of session-id-producer."""

    headerName: Annotated[str, Meta(description="header with the id")] = ""  # noqa: N815 - llm-d's
    cookieName: Annotated[str, Meta(description="or cookie with the id")] = ""  # noqa: N815

    def __post_init__(self) -> None:
        if bool(self.headerName) == bool(self.cookieName):
            raise ValueError("give either headerName or cookieName")


class AgentParameters(Strict, frozen=True):
    """Parameters of agent-identity."""

    additionalSessionHeaders: Annotated[  # noqa: N815 - llm-d's name
        tuple[str, ...], Meta(description="headers to look in before those of known agents")
    ] = ()
