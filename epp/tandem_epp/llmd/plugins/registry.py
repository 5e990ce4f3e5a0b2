"""The registry: every plugin that a configuration can name, one entry each.

To add a plugin, write its class and a row: type name, kind, typed parameters, one line of help, and
what is made of the parameters. Scorers and filters have theirs in `scoring_plugins`, plugins of
llm-d without effect and refused ones in `unsupported`. Then run `make generate`. Validation of the
configuration, the names suggested for a misspelt type and the tables in docs/reference/llm-d.md all
come from the rows. Type and parameter names are llm-d's where llm-d has the plugin.
"""

from collections.abc import Mapping
from typing import Any, Final

from ...choice.routing import PrefixIndexSettings
from .burst_prefix import BurstPrefix
from .conformance import ServedHeader
from .decider import DeciderSettings
from .flow_plugins import FLOW
from .latency_parameters import PredictedLatencyParameters
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
from .plugin_types import Kind, Plugin
from .scorers import PrefixCacheScorer
from .scoring_plugins import FILTERS, SCORERS
from .unsupported import ACCEPTED

PREDICTED_COST: Final = "predicted-cost"
"""What chooses if the configuration lists no scorer, picker, decider, filter or handler."""
PREFIX_DECIDER: Final = "prefix-based-pd-decider"
"""The decider if a configuration lists scorers or pickers, but no decider."""

PLUGINS: Final[tuple[Plugin[Any], ...]] = (
    Plugin(
        PREDICTED_COST, Kind.COST, CostParameters,
        "chooses the backends and whether to split by one predicted cost in seconds; the default;"
        " not to be combined with scorers, pickers or deciders",
        lambda p, _: p,
    ),
    *SCORERS,
    *FILTERS,
    Plugin(
        "max-score-picker", Kind.PICKER, PickerParameters,
        "takes the highest score, ties in random order; the default picker",
        lambda p, _: MaxScorePicker(p.maxNumOfEndpoints),
    ),
    Plugin(
        "random-picker", Kind.PICKER, PickerParameters,
        "takes any backend that no filter rules out, all with the same probability",
        lambda p, _: RandomPicker(p.maxNumOfEndpoints),
    ),
    Plugin(
        "weighted-random-picker", Kind.PICKER, PickerParameters,
        "draws a backend with a probability in proportion to its score",
        lambda p, _: WeightedRandomPicker(p.maxNumOfEndpoints),
    ),
    Plugin(
        PREFIX_DECIDER, Kind.DECIDER, PrefixDeciderParameters,
        "splits requests with enough uncached prompt tokens; the default decider",
        lambda p, _: DeciderSettings(
            non_cached_tokens=p.nonCachedTokens, prompt_tokens=p.promptTokens
        ),
    ),
    Plugin(
        "always-disagg-pd-decider", Kind.DECIDER, NoParameters,
        "splits every request that may be split",
        lambda *_: DeciderSettings(always=True),
    ),
    Plugin(
        "disagg-profile-handler", Kind.HANDLER, HandlerParameters,
        "names the profile of each phase and the decider; with a decider, and without"
        " `disaggregated_serving`, requests are split",
        lambda p, _: p,
    ),
    Plugin(
        "pd-profile-handler", Kind.HANDLER, PdHandlerParameters,
        "older name of disagg-profile-handler, with prefix-based-pd-decider as its decider",
        lambda p, _: HandlerParameters(
            ProfileNames(p.decodeProfile, p.prefillProfile), DeciderNames(p.deciderPluginName)
        ),
    ),
    Plugin(
        "data-parallel-profile-handler", Kind.NOT_NEEDED, DataParallelParameters,
        "ranks behind one port are always found and chosen one by one",
    ),
    Plugin(
        "approx-prefix-cache-producer", Kind.PREFIX_INDEX, PrefixIndexParameters,
        "configures the prefix index, which is always active",
        lambda p, _: PrefixIndexSettings(
            p.blockSizeTokens, p.lruCapacityPerServer, p.memoryLimitBytes
        ),
    ),
    Plugin(
        "precise-prefix-cache-producer", Kind.PRECISE_INDEX, PreciseIndexParameters,
        "follows the engines' KV events: cached prefixes are known exactly",
        events=event_settings,
    ),
    Plugin(
        "precise-prefix-cache-scorer", Kind.SCORER, PreciseIndexParameters,
        "older name of precise-prefix-cache-producer and prefix-cache-scorer together",
        lambda *_: PrefixCacheScorer(), events=event_settings,
    ),
    Plugin(
        "token-producer", Kind.TOKENIZER, TokenizerParameters,
        "tokenizes prompts for the precise index",
        lambda p, _: tokenizer_settings(p),
    ),
    Plugin(
        "tokenizer", Kind.TOKENIZER, TokenizerParameters,
        "older name of token-producer",
        lambda p, _: tokenizer_settings(p),
    ),
    Plugin(
        "burst-prefix-cache-producer", Kind.BURST, BurstParameters,
        "keeps requests with one prompt that come in a burst together; used by a"
        " prefix-cache-scorer that names it",
        lambda p, _: BurstPrefix(p),
    ),
    Plugin(
        "topology-extractor", Kind.SOURCE, TopologyParameters,
        "names the labels that topology-affinity-scorer and -filter compare",
    ),
    Plugin(
        "session-id-producer", Kind.SOURCE, SessionIdParameters,
        "names the header or cookie of session ids: attribute SessionIDDataKey",
    ),
    Plugin(
        "agent-identity", Kind.SOURCE, AgentParameters,
        "names the headers in which agents tell their session: attribute agent-identity",
    ),
    Plugin(
        "predicted-latency-producer", Kind.SOURCE, PredictedLatencyParameters,
        "predicts latencies for latency-scorer, slo-headroom-tier-filter and"
        " prefix-cache-affinity-filter: by the EPP's own estimates, without a predictor beside it",
    ),
    Plugin(
        "metrics-data-source", Kind.METRICS, MetricsSourceParameters,
        "says how the engines' metrics are read, by TLS for example; the EPP always reads them",
        lambda p, _: scrape_settings(p),
    ),
    Plugin(
        "destination-endpoint-served-verifier", Kind.RESPONSE, NoParameters,
        "for conformance tests of gateways: the response header"
        " `x-conformance-test-served-endpoint` names the backend that the gateway used",
        lambda *_: ServedHeader(),
    ),
    *FLOW,
    *ACCEPTED,
)  # fmt: skip
REGISTRY: Final[Mapping[str, Plugin[Any]]] = {plugin.type_name: plugin for plugin in PLUGINS}
