"""Parameters of the plugins: one Struct per plugin type.

The Meta of a field gives its range and its line in the docs.
"""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from tandem_contract import ports
from tandem_contract.config import MIN_PREFILL_LIMIT, SplitMode
from tandem_contract.durations import format_duration, parse_duration

from ...backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS
from ...backends.scrape_settings import ScrapeSettings, client_tls
from ...prefix.kv_events.settings import EventSettings
from ...prefix.pod_blocks import MAX_BYTES
from ...prefix.prefix_tree import LIMIT_BYTES
from ...prefix.tokenization.tokenizer import TokenizerSettings
from .decider import DeciderSettings

_OLD: Final = "ignored: now a parameter of approx-prefix-cache-producer"
_PORT: Final = "ignored: requests go to the pod's serving port, and a plan or header names the rank"


class Strict(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration in which an unknown field is an error."""


class NoParameters(Strict, frozen=True):
    """A plugin without parameters."""


class AnyParameters(Struct, frozen=True):
    """Parameters of a plugin that has no effect here: all are accepted and ignored."""


class PickerParameters(Strict, frozen=True):
    """Parameters of every picker."""

    maxNumOfEndpoints: Annotated[  # noqa: N815 - llm-d's name
        int,
        Meta(
            ge=1,
            description="addresses in the destination header, the decode pod and its alternates; "
            "Tandem's Envoy accepts one and answers 503 to a list",
        ),
    ] = 1


class PrefixDeciderParameters(Strict, frozen=True):
    """Parameters of prefix-based-pd-decider."""

    nonCachedTokens: Annotated[  # noqa: N815 - llm-d's name
        int,
        Meta(
            ge=0,
            description="split from this many uncached prompt tokens on; 0, llm-d's default: never",
        ),
    ] = DeciderSettings().non_cached_tokens
    promptTokens: Annotated[  # noqa: N815
        int, Meta(ge=0, description="and only prompts of at least this many tokens")
    ] = 0


class PrefixScorerParameters(Strict, frozen=True):
    """Parameters of prefix-cache-scorer."""

    prefixMatchInfoProducerName: Annotated[  # noqa: N815 - llm-d's name
        str,
        Meta(
            description="name of a burst-prefix-cache-producer, or of another producer: of those "
            "the precise index answers wherever it knows a backend"
        ),
    ] = ""
    matchLengthWeight: Annotated[  # noqa: N815
        float, Meta(ge=0, le=1, description="share of the match's length in the score")
    ] = 0.0
    matchLengthScaleTokens: Annotated[  # noqa: N815
        int, Meta(ge=1, description="length of a match that scores 1")
    ] = 8192
    hashBlockSize: Annotated[int, Meta(description=_OLD)] = 0  # noqa: N815
    blockSize: Annotated[int, Meta(description=_OLD)] = 0  # noqa: N815
    maxPrefixBlocksToMatch: Annotated[int, Meta(description=_OLD)] = 0  # noqa: N815
    lruCapacityPerServer: Annotated[int, Meta(description=_OLD)] = 0  # noqa: N815


class PrefixIndexParameters(Strict, frozen=True):
    """Parameters of approx-prefix-cache-producer."""

    blockSizeTokens: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=1, description="KV block size if a backend's metrics do not report it")
    ] = BLOCK_TOKENS
    lruCapacityPerServer: Annotated[  # noqa: N815 - llm-d's name
        int,
        Meta(
            ge=1,
            description="KV blocks of a backend if its metrics do not report their number",
        ),
    ] = CAPACITY_BLOCKS
    maxPrefixTokensToMatch: Annotated[  # noqa: N815
        int,
        Meta(
            ge=0,
            description="tokens of a prompt that prefix-cache-scorer compares at most; 0: all "
            "(llm-d's default: 131072); the decider compares all",
        ),
    ] = 0
    maxPrefixBlocksToMatch: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=0, description="ignored: older form of `maxPrefixTokensToMatch`")
    ] = 0
    autoTune: Annotated[  # noqa: N815
        bool, Meta(description="ignored: what a backend's metrics report always comes first")
    ] = True
    blockSize: Annotated[int, Meta(description="ignored: characters, an older form")] = 0  # noqa: N815
    memoryLimitBytes: Annotated[  # noqa: N815 - llm-d's style
        int,
        Meta(
            ge=1_000_000,
            description="memory of the index over all backends; beyond it the backend that holds "
            "most forgets its least recently used prompts",
        ),
    ] = LIMIT_BYTES


class CostParameters(Strict, frozen=True):
    """Parameters of predicted-cost."""

    modelConfigs: Annotated[  # noqa: N815 - in the style of the others
        dict[str, str],
        Meta(
            description="model name → path of its config.json, from which the size of its KV "
            "follows; without it the size is learned from transfers"
        ),
    ] = {}
    kvCacheDtype: Annotated[  # noqa: N815
        str, Meta(description="the engines' `--kv-cache-dtype`; `auto`: the model's own type")
    ] = "auto"
    maxNumOfEndpoints: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=1, description="as for the pickers")
    ] = 1
    split: Annotated[
        SplitMode | None,
        Meta(
            description="`always` splits every request that a prefill pod can take, `auto` what is "
            "faster that way; either turns splitting on where `disaggregated_serving` is silent, "
            "and gives way to its `split`"
        ),
    ] = None
    maxPrefillOnDecode: Annotated[  # noqa: N815
        Annotated[int, Meta(ge=MIN_PREFILL_LIMIT)] | None,
        Meta(
            description="uncached prompt tokens that a decode pod computes at most, while a prefill"
            " pod is healthy; gives way to `max_prefill_on_decode` of `disaggregated_serving`"
        ),
    ] = None
    slo: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="model or adapter name → `{ttft, itl, attainment}`, such as `{ttft: 2s, "
            "itl: 50ms, attainment: 0.9}`: what its requests are to meet; gives way to the section "
            "`slo`"
        ),
    ] = {}


class ProfileNames(Strict, frozen=True):
    """The scheduling profile of each phase."""

    decode: str = "decode"
    prefill: str = "prefill"
    encode: str = ""


class DeciderNames(Strict, frozen=True):
    """The decider of each phase."""

    prefill: str | None = None
    encode: str | None = None

    def __post_init__(self) -> None:
        if self.encode:
            raise ValueError("encode: no pods of their own encode media; nearest: prefill")


class StageOrder(StrEnum):
    """Which phase is chosen first."""

    DECODE_FIRST = "decode-first"


class HandlerParameters(Strict, frozen=True):
    """Parameters of disagg-profile-handler. Without a decider no request is split."""

    profiles: Annotated[
        ProfileNames, Meta(description="names of the `decode` and the `prefill` profile")
    ] = ProfileNames()
    deciders: Annotated[
        DeciderNames, Meta(description="name of the `prefill` decider; none: never split")
    ] = DeciderNames()
    stageOrder: Annotated[  # noqa: N815 - llm-d's name
        StageOrder, Meta(description="`decode-first`: the prefill pod must suit the decode pod")
    ] = StageOrder.DECODE_FIRST
    deciderPluginName: Annotated[  # noqa: N815 - llm-d's name
        str | None, Meta(description="older name of `deciders.prefill`")
    ] = None
    prefillDeciderPluginName: Annotated[  # noqa: N815
        str | None, Meta(description="older name of `deciders.prefill`")
    ] = None
    decodeProfile: Annotated[  # noqa: N815
        str, Meta(description="older name of `profiles.decode`")
    ] = ""
    prefillProfile: Annotated[  # noqa: N815
        str, Meta(description="older name of `profiles.prefill`")
    ] = ""

    @property
    def decode(self) -> str:
        """Name of the profile that chooses decode pods."""
        return self.decodeProfile or self.profiles.decode

    @property
    def prefill(self) -> str:
        """Name of the profile that chooses prefill pods."""
        return self.prefillProfile or self.profiles.prefill

    @property
    def decider(self) -> str | None:
        """Name of the decider; None: no request is split."""
        return (
            self.deciders.prefill or self.prefillDeciderPluginName or self.deciderPluginName or None
        )


class PdHandlerParameters(Strict, frozen=True):
    """Parameters of pd-profile-handler, the older disagg-profile-handler."""

    decodeProfile: Annotated[  # noqa: N815 - llm-d's name
        str, Meta(description="profile that chooses decode pods")
    ] = "decode"
    prefillProfile: Annotated[  # noqa: N815
        str, Meta(description="profile that chooses prefill pods")
    ] = "prefill"
    deciderPluginName: Annotated[  # noqa: N815
        str, Meta(min_length=1, description="the decider")
    ] = "prefix-based-pd-decider"
    primaryPort: Annotated[int, Meta(ge=0, le=65535, description=_PORT)] = 0  # noqa: N815
    prefixPluginType: Annotated[str, Meta(description="ignored, as in llm-d")] = ""  # noqa: N815
    prefixPluginName: Annotated[str, Meta(description="ignored, as in llm-d")] = ""  # noqa: N815
    prefixMatchInfoProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class DataParallelParameters(Strict, frozen=True):
    """Parameters of data-parallel-profile-handler."""

    primaryPort: Annotated[int, Meta(ge=0, le=65535, description=_PORT)] = 8000  # noqa: N815


class MetricsSourceParameters(Strict, frozen=True):
    """Parameters of metrics-data-source."""

    scheme: Annotated[
        Literal["http", "https"],
        Meta(
            description="of pods that are found in a cluster, for warm-ups as well; a backend of "
            "`backends` has it in its URL"
        ),
    ] = "http"
    path: Annotated[str, Meta(pattern="^/", description="of the page")] = ScrapeSettings.path
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="of the page, where it is not the port of requests"),
    ] = None
    insecureSkipVerify: Annotated[  # noqa: N815 - llm-d's name
        bool, Meta(description="with https, any certificate is accepted")
    ] = True
    caCertPath: Annotated[  # noqa: N815
        str,
        Meta(
            description="PEM file of the authorities whose certificates are accepted if "
            "`insecureSkipVerify` is false; else the system's. Read again when the configuration "
            "is reloaded"
        ),
    ] = ""
    clientCertPath: Annotated[  # noqa: N815
        str, Meta(description="PEM file of the EPP's own certificate")
    ] = ""
    clientKeyPath: Annotated[str, Meta(description="and of its key")] = ""  # noqa: N815
    interval: Annotated[
        str, Meta(description="ignored: engines are scraped fast under load and slowly at rest")
    ] = ""


def scrape_settings(parameters: MetricsSourceParameters) -> ScrapeSettings:
    """The settings that the parameters stand for. Raises ValueError."""
    tls = client_tls(
        verifies=not parameters.insecureSkipVerify,
        authorities=parameters.caCertPath,
        certificate=parameters.clientCertPath,
        key=parameters.clientKeyPath,
    )
    return ScrapeSettings(parameters.scheme, parameters.path, parameters.port, tls)


Port = Annotated[int, Meta(ge=1, le=65535)]
Duration = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(ms|s|m|h)$")]


class PodDiscovery(Strict, frozen=True):
    """The ports of engines."""

    socketPort: Port = ports.KV_EVENTS  # noqa: N815 - llm-d's name
    replayPort: Port = ports.KV_EVENTS_REPLAY  # noqa: N815


class KvEvents(Strict, frozen=True):
    """How events are received."""

    topicFilter: str = ""  # noqa: N815 - llm-d's name
    podDiscoveryConfig: PodDiscovery = PodDiscovery()  # noqa: N815
    discoverPods: bool = True  # noqa: N815
    engineType: str = "vllm"  # noqa: N815
    concurrency: int = 0
    zmqEndpoint: str = ""  # noqa: N815


class PreciseIndexParameters(Strict, frozen=True):
    """Parameters of precise-prefix-cache-producer."""

    kvEventsConfig: Annotated[  # noqa: N815 - llm-d's name
        KvEvents,
        Meta(
            description="`topicFilter`; `podDiscoveryConfig.socketPort` (5557) and `.replayPort` "
            "(5657), to which the data-parallel rank is added; the rest of llm-d's is ignored: the "
            "EPP connects to every pod"
        ),
    ] = KvEvents()
    maxBytes: Annotated[  # noqa: N815 - in the style of the others
        int, Meta(ge=1 << 20, description="bytes of the index, over all pods")
    ] = MAX_BYTES
    indexerConfig: Annotated[  # noqa: N815
        dict[str, Any], Meta(description="ignored")
    ] = {}
    tokenProcessorConfig: Annotated[  # noqa: N815
        dict[str, Any],
        Meta(description="ignored: block sizes come from the events, hashes are not recomputed"),
    ] = {}
    speculativeIndexing: Annotated[  # noqa: N815
        bool, Meta(description="ignored: placed prompts always count for affinity")
    ] = False
    speculativeTTL: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class VllmRender(Strict, frozen=True):
    """vLLM's render endpoint."""

    url: str = "http://localhost:8000"
    timeout: Duration = format_duration(TokenizerSettings().deadline)
    mmTimeout: Duration = format_duration(TokenizerSettings().media_deadline)  # noqa: N815


class TokenizerParameters(Strict, frozen=True):
    """Parameters of token-producer."""

    modelName: Annotated[  # noqa: N815 - llm-d's name
        str,
        Meta(
            description="the model as the render endpoint knows it; requests for another model use "
            "a LoRA adapter of that name. Several plugins tokenize for several models"
        ),
    ] = ""
    loraAdapters: Annotated[  # noqa: N815 - in the style of the others
        tuple[str, ...],
        Meta(description="the model's adapters; needed beside plugins for other models"),
    ] = ()
    vllm: Annotated[
        VllmRender | None,
        Meta(
            description="`url` of an endpoint of vLLM that renders prompts (`vllm serve`, or "
            "`vllm launch render` without a GPU); `timeout` (200ms) and, for media, `mmTimeout` "
            "(2s), after which a request is placed without its tokens"
        ),
    ] = None
    estimate: Annotated[
        dict[str, Any] | None,
        Meta(description="no tokenizer: prompts are estimated, as without token-producer"),
    ] = None
    udsTokenizerConfig: Annotated[  # noqa: N815
        dict[str, Any] | None,
        Meta(description="refused: use `vllm`, as llm-d advises, or `path`"),
    ] = None
    path: Annotated[
        str,
        Meta(
            description="instead of `vllm.url`: a directory with tokenizer.json and chat template"
        ),
    ] = ""
    cacheBytes: Annotated[  # noqa: N815
        int, Meta(ge=0, description="bytes of cached token ids")
    ] = TokenizerSettings().cache_bytes

    def __post_init__(self) -> None:
        if self.udsTokenizerConfig is not None:
            raise ValueError("udsTokenizerConfig: no such tokenizer; use vllm.url, or path")
        if self.estimate is not None and (self.vllm or self.path):
            raise ValueError("estimate goes without vllm and path")


def event_settings(parameters: PreciseIndexParameters) -> EventSettings:
    """The settings that the parameters stand for."""
    events = parameters.kvEventsConfig
    ports_of_pods = events.podDiscoveryConfig
    return EventSettings(
        ports_of_pods.socketPort, ports_of_pods.replayPort, events.topicFilter, parameters.maxBytes
    )


def tokenizer_settings(parameters: TokenizerParameters) -> TokenizerSettings:
    """The settings that the parameters stand for."""
    vllm = parameters.vllm or VllmRender(url="")
    return TokenizerSettings(
        directory=parameters.path,
        url=vllm.url,
        model=parameters.modelName,
        adapters=parameters.loraAdapters,
        deadline=parse_duration(vllm.timeout),
        media_deadline=parse_duration(vllm.mmTimeout),
        cache_bytes=parameters.cacheBytes,
    )
