"""Parameters of the plugins: one Struct per plugin type.

The Meta of a field gives its range and its line in the docs.
"""

from typing import Annotated

from msgspec import Meta, Struct

from ..backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS
from ..backends.prefix_tree import LIMIT_BYTES
from .decider import DeciderSettings


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
        Meta(ge=0, description="split from this many uncached prompt tokens on; 0: never"),
    ] = DeciderSettings().non_cached_tokens


class PrefixScorerParameters(Strict, frozen=True):
    """Parameters of prefix-cache-scorer."""

    prefixMatchInfoProducerName: Annotated[  # noqa: N815 - llm-d's name
        str, Meta(description="ignored: the precise index answers wherever it knows a backend")
    ] = ""


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
    maxPrefixBlocksToMatch: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(ge=0, description="ignored: prompts are matched to their end")
    ] = 0
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


class ProfileNames(Strict, frozen=True):
    """The scheduling profile of each phase."""

    decode: str = "decode"
    prefill: str = "prefill"


class DeciderNames(Strict, frozen=True):
    """The decider of each phase."""

    prefill: str | None = None


class HandlerParameters(Strict, frozen=True):
    """Parameters of disagg-profile-handler. Without a decider no request is split."""

    profiles: Annotated[
        ProfileNames, Meta(description="names of the `decode` and the `prefill` profile")
    ] = ProfileNames()
    deciders: Annotated[
        DeciderNames, Meta(description="name of the `prefill` decider; none: never split")
    ] = DeciderNames()
    deciderPluginName: Annotated[  # noqa: N815 - llm-d's name
        str | None, Meta(description="older name of `deciders.prefill`")
    ] = None
