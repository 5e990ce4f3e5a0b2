"""The registry: every plugin that a configuration can name, one entry each.

To add a scorer, write its class in `scorers` and an entry in PLUGINS: type name, factory, typed
parameters, default weight, one line of help. Then run `make generate`. Validation of the
configuration, the names suggested for a misspelt type and the table in docs/epp.md all come from
the entries. Type and parameter names are llm-d's where llm-d has the plugin.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Generic, TypeVar

from msgspec import Struct

from tandem_contract.paths import Role

from ..backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS
from ..backends.prefix_tree import LIMIT_BYTES
from ..kv_events.settings import EventSettings
from ..tokenization.tokenizer import TokenizerSettings
from .decider import DeciderSettings
from .parameters import (
    AnyParameters,
    CostParameters,
    HandlerParameters,
    NoParameters,
    PickerParameters,
    PrefixDeciderParameters,
    PrefixIndexParameters,
    PrefixScorerParameters,
)
from .pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from .precise_parameters import (
    PreciseIndexParameters,
    TokenizerParameters,
    event_settings,
    tokenizer_settings,
)
from .profile import Picker, Scorer
from .scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoraAffinityScorer,
    PrefixCacheScorer,
    QueueScorer,
    RoleFilter,
    RunningRequestsSizeScorer,
)


@dataclass(frozen=True)
class PrefixIndexSettings:
    """The prefix index."""

    block_tokens: int = BLOCK_TOKENS
    """KV block size of a backend whose metrics do not report it."""
    capacity_blocks: int = CAPACITY_BLOCKS
    """KV blocks of a backend whose metrics do not report their number."""
    limit_bytes: int = LIMIT_BYTES
    """Memory of the index over all backends."""


P = TypeVar("P", bound=Struct)


@dataclass(frozen=True, kw_only=True)
class PluginType(Generic[P]):
    """A registry entry. The subclass says what the plugin is used for and what its factory makes
    of the parameters."""

    kind: ClassVar[str]
    type_name: str
    """Name in `plugins[].type`."""
    parameters: type[P]
    """The Struct that `plugins[].parameters` is converted to."""
    help: str
    """One line for the documentation."""


@dataclass(frozen=True, kw_only=True)
class FilterType(PluginType[P]):
    """Rules backends out; a weight has no meaning."""

    kind = "filter"
    factory: Callable[[P], Scorer]
    phase: Role | None = None
    """The only phase that it applies to if the configuration has no profiles; None: both."""


@dataclass(frozen=True, kw_only=True)
class ScorerType(PluginType[P]):
    """Rates backends."""

    kind = "scorer"
    factory: Callable[[P], Scorer]


@dataclass(frozen=True, kw_only=True)
class PickerType(PluginType[P]):
    """Draws from the scored backends."""

    kind = "picker"
    factory: Callable[[P], Picker]


@dataclass(frozen=True, kw_only=True)
class DeciderType(PluginType[P]):
    """Decides whether a request is split."""

    kind = "decider"
    factory: Callable[[P], DeciderSettings]


@dataclass(frozen=True, kw_only=True)
class CostType(PluginType[P]):
    """Chooses the decode pod, the path and the prefill pod by one cost; stands alone."""

    kind = "cost"
    factory: Callable[[P], P]


@dataclass(frozen=True, kw_only=True)
class HandlerType(PluginType[P]):
    """Assigns profiles and a decider to phases."""

    kind = "handler"
    factory: Callable[[P], HandlerParameters]


@dataclass(frozen=True, kw_only=True)
class PrefixIndexType(PluginType[P]):
    """Configures the prefix index."""

    kind = "index"
    factory: Callable[[P], PrefixIndexSettings]


@dataclass(frozen=True, kw_only=True)
class PreciseIndexType(PluginType[P]):
    """Follows the engines' KV events."""

    kind = "index"
    factory: Callable[[P], EventSettings]


@dataclass(frozen=True, kw_only=True)
class PreciseScorerType(ScorerType[P]):
    """Rates backends by the precise index, which it switches on."""

    index: Callable[[P], EventSettings]


@dataclass(frozen=True, kw_only=True)
class TokenizerType(PluginType[P]):
    """Tokenizes prompts for the precise index."""

    kind = "index"
    factory: Callable[[P], TokenizerSettings]


@dataclass(frozen=True, kw_only=True)
class AcceptedType(PluginType[P]):
    """A plugin of llm-d for something that this picker always does: listing it has no effect."""

    kind = "no effect"


def _accepted(type_name: str, purpose: str) -> AcceptedType[AnyParameters]:
    return AcceptedType(type_name=type_name, parameters=AnyParameters, help=purpose)


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
    ScorerType(
        type_name="prefix-cache-scorer",
        factory=lambda _: PrefixCacheScorer(),
        parameters=PrefixScorerParameters,
        help="prefers backends to which more of the prompt was routed before",
    ),
    ScorerType(
        type_name="active-request-scorer",
        factory=lambda _: ActiveRequestScorer(),
        parameters=NoParameters,
        help="prefers backends with fewer requests in flight",
    ),
    ScorerType(
        type_name="queue-scorer",
        factory=lambda _: QueueScorer(),
        parameters=NoParameters,
        help="prefers engines with fewer waiting requests",
    ),
    ScorerType(
        type_name="running-requests-size-scorer",
        factory=lambda _: RunningRequestsSizeScorer(),
        parameters=NoParameters,
        help="prefers engines with fewer running requests",
    ),
    ScorerType(
        type_name="kv-cache-utilization-scorer",
        factory=lambda _: KvCacheUtilizationScorer(),
        parameters=NoParameters,
        help="prefers engines with a larger free share of the KV cache",
    ),
    ScorerType(
        type_name="lora-affinity-scorer",
        factory=lambda _: LoraAffinityScorer(),
        parameters=NoParameters,
        help="prefers engines that have the request's LoRA adapter, then those with a free slot",
    ),
    FilterType(
        type_name="prefill-filter",
        factory=lambda _: RoleFilter(Role.PREFILL),
        parameters=NoParameters,
        phase=Role.PREFILL,
        help="keeps backends that may prefill; always active in the prefill profile",
    ),
    FilterType(
        type_name="decode-filter",
        factory=lambda _: RoleFilter(Role.DECODE),
        parameters=NoParameters,
        phase=Role.DECODE,
        help="keeps backends that may decode; always active in the decode profile",
    ),
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
        factory=lambda parameters: DeciderSettings(non_cached_tokens=parameters.nonCachedTokens),
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
        help="names the profile of each phase and the decider",
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
        factory=lambda _: PrefixCacheScorer(),
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
    _accepted("core-metrics-extractor", "the EPP always reads the engines' load metrics"),
    _accepted("disagg-headers-handler", "the EPP always names prefill pods in a header"),
    _accepted("endpoint-notification-source", "discovery always notifies the EPP of changes"),
    _accepted("inflight-load-producer", "the EPP always counts requests in flight"),
    _accepted("metrics-data-source", "the EPP always scrapes its backends"),
    _accepted("openai-parser", "the EPP always reads bodies of the APIs it knows"),
    _accepted("prefill-header-handler", "the EPP always names prefill pods in a header"),
    _accepted("single-profile-handler", "one profile serves both phases if only one is listed"),
)
REGISTRY: Final[Mapping[str, PluginType[Any]]] = {plugin.type_name: plugin for plugin in PLUGINS}


def unknown_name(what: str, name: str, names: Collection[str]) -> str:
    """The message for a `name` that is not among `names`, with the most similar of them."""
    similar = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(sorted(names))}"
    return f"unknown {what} {name!r}; {hint}"
