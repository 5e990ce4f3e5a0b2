"""The kinds of plugins, one class each: what a plugin is used for, and what its factory makes of
the parameters. `registry` lists the plugins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from tandem_contract.paths import Role

from ...backends.pods import Pod
from ...backends.scrape_settings import ScrapeSettings
from ...choice.context import ChoiceContext
from ...choice.routing import PrefixIndexSettings
from ...prefix.kv_events.settings import EventSettings
from ...prefix.tokenization.tokenizer import TokenizerSettings
from .burst_prefix import BurstPrefix
from .conformance import ServedHeader
from .decider import DeciderSettings
from .parameters import HandlerParameters
from .profile import Filter, Picker, Scorer

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
    factory: Callable[[P, "Listed"], Filter]
    phase: Role | None = None
    """The only phase that it applies to where both use the same plugins; None: both."""


@dataclass(frozen=True, kw_only=True)
class ScorerType(PluginType[P]):
    """Rates backends."""

    kind = "scorer"
    factory: Callable[[P, "Listed"], Scorer]
    filter: Callable[[P], Filter | None] = lambda _: None
    """The filter that comes with it; None: it rules nothing out."""


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
class BurstType(PluginType[P]):
    """Keeps requests that share a prompt together."""

    kind = "index"
    factory: Callable[[P], BurstPrefix]


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
class ServedHeaderType(PluginType[P]):
    """Adds the served endpoint to responses."""

    kind = "response"
    factory: Callable[[P], ServedHeader]


@dataclass(frozen=True, kw_only=True)
class SourceType(PluginType[P]):
    """Says from which labels or headers other plugins read; has no effect without them."""

    kind = "source"


@dataclass(frozen=True, kw_only=True)
class MetricsSourceType(PluginType[P]):
    """Says how the engines' metrics are read."""

    kind = "source"
    factory: Callable[[P], ScrapeSettings]
    """Raises ValueError."""


@dataclass(frozen=True, kw_only=True)
class AcceptedType(PluginType[P]):
    """A plugin of llm-d that may be listed and has no effect."""

    kind = "no effect"
    is_lost: bool = False
    """Whether what it does in llm-d is missing here; False: the EPP always does it."""


@dataclass(frozen=True)
class RefusedType:
    """A plugin of llm-d without which requests would be served in another way than its user
    expects."""

    reason: str
    nearest: str
    """What to list instead."""


class Listed(Protocol):
    """The plugins of a configuration, for those that use others."""

    prefill_profile: str
    """Name of the profile that chooses prefill pods."""

    @property
    def names(self) -> Sequence[str]:
        """Of all plugins."""

    def parameters(self, of: type[P]) -> P | None:
        """The parameters of the first listed plugin whose parameters are of this class."""

    def burst(self, name: str) -> BurstPrefix | None:
        """The burst-prefix-cache-producer of this name."""

    @property
    def prefix_tokens(self) -> int:
        """Most tokens of a prompt that its prefixes are compared in; 0: all."""


@runtime_checkable
class PlacementLearner(Protocol):
    """A filter or scorer that remembers where requests went."""

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        """The request of `context` goes to these pods; called once per request that was scored."""
