"""Parameters of the plugins: one Struct per plugin type.

The Meta of a field gives its range and its line in the docs.
"""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

from ...backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS
from ...prefix.prefix_tree import LIMIT_BYTES
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
