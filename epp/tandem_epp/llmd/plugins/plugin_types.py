"""A row of the registry: what a plugin is for, and what is made of its parameters. `registry` and
`scoring_plugins` have the rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from tandem_contract.paths import Role

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from ...prefix.kv_events.settings import EventSettings
from .burst_prefix import BurstPrefix
from .profile import Filter

P = TypeVar("P", bound=Struct)


class Kind(StrEnum):
    """What a plugin is for, in the words of docs/reference/llm-d.md."""

    COST = "cost"
    """Chooses the decode pod, the path and the prefill pod by one cost; stands alone. Makes
    CostParameters."""
    SCORER = "scorer"
    """Rates backends. Makes a Scorer."""
    FILTER = "filter"
    """Rules backends out; a weight has no meaning. Makes a Filter."""
    PICKER = "picker"
    """Draws from the scored backends. Makes a Picker."""
    DECIDER = "decider"
    """Decides whether a request is split. Makes DeciderSettings."""
    HANDLER = "handler"
    """Assigns profiles and a decider to phases. Makes HandlerParameters."""
    PREFIX_INDEX = "prefix index"
    """Makes PrefixIndexSettings."""
    PRECISE_INDEX = "precise index"
    """Follows the engines' KV events. Has `events`."""
    BURST = "bursts"
    """Keeps requests that share a prompt together. Makes a BurstPrefix."""
    TOKENIZER = "tokenizer"
    """Tokenizes prompts for the precise index. Makes TokenizerSettings."""
    RESPONSE = "response"
    """Adds the served endpoint to responses. Makes a ServedHeader."""
    METRICS = "metrics"
    """Says how the engines' metrics are read. Makes ScrapeSettings, or raises ValueError."""
    SOURCE = "source"
    """Says from which labels or headers other plugins read; has no effect without them."""
    FAIRNESS = "fairness"
    """Whose turn it is in flow control. Makes a `flow.settings.Fairness`."""
    ORDERING = "ordering"
    """Which of a tenant's requests goes first. Makes a `flow.settings.Order`."""
    DETECTOR = "saturation detector"
    """Says when pods are saturated; in a profile a filter. Makes a `flow.detectors.Detector`, or
    None: the predictions say it."""
    USAGE_LIMIT = "usage limits"
    """Lets priorities wait from different saturations on. Makes `flow.ceilings.Ceilings`."""
    NOT_NEEDED = "accepted, not needed"
    """The EPP always does what it does in llm-d."""
    NO_EFFECT = "accepted without effect"
    """What it does in llm-d is missing here."""


CHOOSING: Final = frozenset((Kind.SCORER, Kind.FILTER, Kind.PICKER, Kind.DECIDER, Kind.HANDLER))
"""Kinds that take part in a choice by scores."""


@dataclass(frozen=True)
class Plugin(Generic[P]):
    """A registry entry."""

    type_name: str
    """Name in `plugins[].type`."""
    kind: Kind
    parameters: type[P]
    """The Struct that `plugins[].parameters` is converted to."""
    help: str
    """One line for the documentation; why it has no effect."""
    make: Callable[[P, "Listed"], Any] = lambda *_: None
    """What the kind says."""
    filter: Callable[[P], Filter | None] = lambda _: None
    """The filter that comes with a scorer; None: it rules nothing out."""
    events: Callable[[P], EventSettings] | None = None
    """The precise index that is switched on; None: none is."""
    phase: Role | None = None
    """The only phase that a filter applies to where both use the same plugins; None: both."""


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
