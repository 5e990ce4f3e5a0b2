"""The plugins that a configuration can name, their parameters, and llm-d's names for both."""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Final

import msgspec

from tandem_contract.paths import Role

from ..backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS
from ..backends.prefix_index import GENERATIONS
from .decider import Rules
from .pickers import MaxScorePicker, RandomPicker, WeightedRandomPicker
from .profile import Picker, Scorer
from .scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    PrefixCacheScorer,
    QueueScorer,
    RoleFilter,
    RunningRequestsSizeScorer,
)

SCORERS: Final[Mapping[str, Callable[[], Scorer]]] = {
    "prefix-cache-scorer": PrefixCacheScorer,
    "queue-scorer": QueueScorer,
    "running-requests-size-scorer": RunningRequestsSizeScorer,
    "kv-cache-utilization-scorer": KvCacheUtilizationScorer,
    "active-request-scorer": ActiveRequestScorer,
    "prefill-filter": lambda: RoleFilter(Role.PREFILL),
    "decode-filter": lambda: RoleFilter(Role.DECODE),
}
PICKERS: Final[Mapping[str, Callable[[], Picker]]] = {
    "max-score-picker": MaxScorePicker,
    "random-picker": RandomPicker,
    "weighted-random-picker": WeightedRandomPicker,
}
BUILT_IN: Final = frozenset(
    {
        "core-metrics-extractor",
        "disagg-headers-handler",
        "endpoint-notification-source",
        "inflight-load-producer",
        "metrics-data-source",
        "openai-parser",
        "prefill-header-handler",
        "single-profile-handler",
    }
)
"""Plugins for what this picker always does; listing them changes nothing."""

HANDLER: Final = "disagg-profile-handler"
PREFIX_DECIDER: Final = "prefix-based-pd-decider"
ALWAYS_DECIDER: Final = "always-disagg-pd-decider"
PRODUCER: Final = "approx-prefix-cache-producer"
DEFAULT_WEIGHTS: Final = (
    ("prefix-cache-scorer", 3.0),
    ("active-request-scorer", 2.0),
    ("queue-scorer", 1.0),
)


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of the configuration, where a field nobody knows is a mistake."""


class NoParameters(Strict, frozen=True):
    """A plugin that takes none."""


class PickerParameters(Strict, frozen=True):
    """`maxNumOfEndpoints`: addresses in the destination header, alternates included.

    Default 1: an ORIGINAL_DST cluster, as in our Envoy configuration, takes one address and
    answers 503 to a list. More for a gateway that understands lists.
    """

    maxNumOfEndpoints: int = 1  # noqa: N815 - llm-d's name


class DeciderParameters(Strict, frozen=True):
    """`nonCachedTokens`, see `decide.Rules.non_cached_tokens`."""

    nonCachedTokens: int = Rules().non_cached_tokens  # noqa: N815 - llm-d's name


class ProducerParameters(Strict, frozen=True):
    """The prefix index of a backend whose metrics do not tell its block size and count.

    `maxPrefixBlocksToMatch` is taken and has no effect: a match costs the logarithm of the length.
    """

    blockSizeTokens: int = BLOCK_TOKENS  # noqa: N815 - llm-d's names
    lruCapacityPerServer: int = CAPACITY_BLOCKS  # noqa: N815
    maxPrefixBlocksToMatch: int = 0  # noqa: N815


class ProfileNames(Strict, frozen=True):
    """Which profile serves which phase."""

    decode: str = "decode"
    prefill: str = "prefill"


class DeciderNames(Strict, frozen=True):
    """Which decider runs for which phase."""

    prefill: str | None = None


class HandlerParameters(Strict, frozen=True):
    """Profiles and decider by name; without a decider nothing is split."""

    profiles: ProfileNames = ProfileNames()
    deciders: DeciderNames = DeciderNames()
    deciderPluginName: str | None = None  # noqa: N815 - the decider's older place


PARAMETERS: Final[Mapping[str, type[Strict]]] = {
    **dict.fromkeys(PICKERS, PickerParameters),
    HANDLER: HandlerParameters,
    PREFIX_DECIDER: DeciderParameters,
    PRODUCER: ProducerParameters,
}
KNOWN: Final = (*SCORERS, *PICKERS, HANDLER, PREFIX_DECIDER, ALWAYS_DECIDER, PRODUCER, *BUILT_IN)


LEAST: Final[Mapping[str, int]] = {
    "maxNumOfEndpoints": 1,
    "blockSizeTokens": 1,
    "lruCapacityPerServer": GENERATIONS,
}
"""Smallest value of a number that may not be 0; of any other it is 0."""


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The message that nothing of `known` is called `name`, with the nearest that is."""
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {what} {name!r}; {hint}"
