"""The registry: every plugin that a configuration can name, one entry each.

To add a plugin, write its class and an entry: type name, factory, typed parameters, one line of
help. Scorers and filters have theirs in `scoring_plugins`, plugins of llm-d without effect and
refused ones in `unsupported`. Then run `make generate`. Validation of the configuration, the names
suggested for a misspelt type and the tables in docs/reference/llm-d.md all come from the entries.
Type and parameter names are llm-d's where llm-d has the plugin.
"""

from collections.abc import Mapping
from typing import Any, Final

from ...choice.routing import PrefixIndexSettings
from .burst_prefix import BurstPrefix
from .conformance import ServedHeader
from .decider import DeciderSettings
from .llmd_parameters import (
    AgentParameters,
    BurstParameters,
    SessionIdParameters,
    TopologyParameters,
)
from .parameters import (
    CostParameters,
    DataParallelParameters,
    DeciderNames,
    HandlerParameters,
    MetricsSourceParameters,
    NoParameters,
    PdHandlerParameters,
    PickerParameters,
    PreciseIndexParameters,
    PrefixDeciderParameters,
    PrefixIndexParameters,
    ProfileNames,
    TokenizerParameters,
    event_settings,
    scrape_settings,
    tokenizer_settings,
)
from .pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from .plugin_types import (
    AcceptedType,
    BurstType,
    CostType,
    DeciderType,
    HandlerType,
    MetricsSourceType,
    PickerType,
    PluginType,
    PreciseIndexType,
    PreciseScorerType,
    PrefixIndexType,
    ServedHeaderType,
    SourceType,
    TokenizerType,
)
from .scorers import PrefixCacheScorer
from .scoring_plugins import FILTERS, SCORERS
from .unsupported import ACCEPTED

PREDICTED_COST: Final = "predicted-cost"
"""What chooses if the configuration lists no scorer, picker, decider, filter or handler."""
PREFIX_DECIDER: Final = "prefix-based-pd-decider"
"""The decider if a configuration lists scorers or pickers, but no decider."""

PLUGINS: Final[tuple[PluginType[Any], ...]] = (
    CostType(
        type_name=PREDICTED_COST,
        factory=lambda parameters: parameters,
        parameters=CostParameters,
        help="chooses the backends and whether to split by one predicted cost in seconds; the "
        "default; not to be combined with scorers, pickers or deciders",
    ),
    *SCORERS,
    *FILTERS,
    PickerType(
        type_name="max-score-picker",
        factory=lambda parameters: MaxScorePicker(parameters.maxNumOfEndpoints),
        parameters=PickerParameters,
        help="takes the highest score, ties in random order; the default picker",
    ),
    PickerType(
        type_name="random-picker",
        factory=lambda parameters: RandomPicker(parameters.maxNumOfEndpoints),
        parameters=PickerParameters,
        help="takes any backend that no filter rules out, all with the same probability",
    ),
    PickerType(
        type_name="weighted-random-picker",
        factory=lambda parameters: WeightedRandomPicker(parameters.maxNumOfEndpoints),
        parameters=PickerParameters,
        help="draws a backend with a probability in proportion to its score",
    ),
    DeciderType(
        type_name=PREFIX_DECIDER,
        factory=lambda p: DeciderSettings(
            non_cached_tokens=p.nonCachedTokens, prompt_tokens=p.promptTokens
        ),
        parameters=PrefixDeciderParameters,
        help="splits requests with enough uncached prompt tokens; the default decider",
    ),
    DeciderType(
        type_name="always-disagg-pd-decider",
        factory=lambda _: DeciderSettings(always=True),
        parameters=NoParameters,
        help="splits every request that may be split",
    ),
    HandlerType(
        type_name="disagg-profile-handler",
        factory=lambda parameters: parameters,
        parameters=HandlerParameters,
        help="names the profile of each phase and the decider; with a decider, and without "
        "`disaggregated_serving`, requests are split",
    ),
    HandlerType(
        type_name="pd-profile-handler",
        factory=lambda p: HandlerParameters(
            ProfileNames(p.decodeProfile, p.prefillProfile), DeciderNames(p.deciderPluginName)
        ),
        parameters=PdHandlerParameters,
        help="older name of disagg-profile-handler, with prefix-based-pd-decider as its decider",
    ),
    AcceptedType(
        type_name="data-parallel-profile-handler",
        parameters=DataParallelParameters,
        help="ranks behind one port are always found and chosen one by one",
    ),
    PrefixIndexType(
        type_name="approx-prefix-cache-producer",
        factory=lambda parameters: PrefixIndexSettings(
            parameters.blockSizeTokens,
            parameters.lruCapacityPerServer,
            parameters.memoryLimitBytes,
        ),
        parameters=PrefixIndexParameters,
        help="configures the prefix index, which is always active",
    ),
    PreciseIndexType(
        type_name="precise-prefix-cache-producer",
        factory=event_settings,
        parameters=PreciseIndexParameters,
        help="follows the engines' KV events: cached prefixes are known exactly",
    ),
    PreciseScorerType(
        type_name="precise-prefix-cache-scorer",
        factory=lambda *_: PrefixCacheScorer(),
        index=event_settings,
        parameters=PreciseIndexParameters,
        help="older name of precise-prefix-cache-producer and prefix-cache-scorer together",
    ),
    TokenizerType(
        type_name="token-producer",
        factory=tokenizer_settings,
        parameters=TokenizerParameters,
        help="tokenizes prompts for the precise index",
    ),
    TokenizerType(
        type_name="tokenizer",
        factory=tokenizer_settings,
        parameters=TokenizerParameters,
        help="older name of token-producer",
    ),
    BurstType(
        type_name="burst-prefix-cache-producer",
        factory=BurstPrefix,
        parameters=BurstParameters,
        help="keeps requests with one prompt that come in a burst together; used by a "
        "prefix-cache-scorer that names it",
    ),
    SourceType(
        type_name="topology-extractor",
        parameters=TopologyParameters,
        help="names the labels that topology-affinity-scorer and -filter compare",
    ),
    SourceType(
        type_name="session-id-producer",
        parameters=SessionIdParameters,
        help="names the header or cookie of session ids: attribute SessionIDDataKey",
    ),
    SourceType(
        type_name="agent-identity",
        parameters=AgentParameters,
        help="names the headers in which agents tell their session: attribute agent-identity",
    ),
    MetricsSourceType(
        type_name="metrics-data-source",
        factory=scrape_settings,
        parameters=MetricsSourceParameters,
        help="says how the engines' metrics are read, by TLS for example; the EPP always reads "
        "them",
    ),
    ServedHeaderType(
        type_name="destination-endpoint-served-verifier",
        factory=lambda _: ServedHeader(),
        parameters=NoParameters,
        help="for conformance tests of gateways: the response header "
        "`x-conformance-test-served-endpoint` names the backend that the gateway used",
    ),
    *ACCEPTED,
)
REGISTRY: Final[Mapping[str, PluginType[Any]]] = {plugin.type_name: plugin for plugin in PLUGINS}
