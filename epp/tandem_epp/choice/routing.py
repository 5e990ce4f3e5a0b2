"""What of the configuration a choice depends on; a reload replaces it as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tandem_contract.api_paths import ApiPaths
from tandem_contract.config import DisaggregatedServing
from tandem_contract.plan import ResumeLimits
from tandem_planner.objective import Objective, make_objective

from ..backends.fleet import Fleet
from ..backends.pods import BLOCK_TOKENS, CAPACITY_BLOCKS, Pod
from ..backends.scrape_settings import ScrapeSettings
from ..flow.settings import FlowSettings
from ..prefix.kv_events.settings import EventSettings
from ..prefix.prefix_tree import LIMIT_BYTES
from ..prefix.tokenization.tokenizer import TokenizerSettings
from .context import ChoiceContext
from .cost_choice import CostSettings
from .result import SchedulingResult


@dataclass(frozen=True)
class PrefixIndexSettings:
    """The prefix index."""

    block_tokens: int = BLOCK_TOKENS
    """KV block size of a backend whose metrics do not report it."""
    capacity_blocks: int = CAPACITY_BLOCKS
    """KV blocks of a backend whose metrics do not report their number."""
    limit_bytes: int = LIMIT_BYTES
    """Memory of the index over all backends."""


class Chooser(Protocol):
    """Chooses pods in place of the cost: `llmd.plugins.score_choice`."""

    @property
    def can_split(self) -> bool:
        """Whether it splits any request."""

    def choose(
        self,
        fleet: Fleet,
        serving: DisaggregatedServing,
        ready: tuple[Pod, ...],
        context: ChoiceContext,
        *,
        model: str | None,
        subset: frozenset[str] | None,
        random: Random,
    ) -> SchedulingResult | None:
        """Choose among `ready`, the pods of `fleet` that may serve a request for `model` and that
        `subset` allows; None: none of them may decode. Raises NoBackend, SplitImpossible."""

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        """The request of `context` goes to these pods; called once for each request."""


class AddedHeader(Protocol):
    """A header that responses get in addition."""

    def response_header(
        self, decode: Pod, prefill: Pod | None, served: str | None
    ) -> tuple[str, str] | None:
        """Name and value in the response of these pods; None: this response has none. `served`:
        the endpoint that the gateway used; None if it does not tell."""


@dataclass(frozen=True)
class Notice:
    """A part of a configuration that is accepted and has no effect, or not that which its user
    expects."""

    where: str
    """`file:line`."""
    part: str
    """The plugin or section."""
    reason: str
    is_lost: bool = True
    """Whether its user misses something; False: the EPP does the same without it."""

    @property
    def line(self) -> int:
        """Of the file."""
        return int(self.where.rpartition(":")[2])

    def __str__(self) -> str:
        verdict = "has no effect" if self.is_lost else "is not needed"
        return f"{self.where}: {self.part} {verdict}: {self.reason}"


@dataclass(frozen=True)
class Scheduling:
    """How pods are chosen, and what is known of them for that."""

    cost: CostSettings = field(default_factory=CostSettings)
    """The choice by cost."""
    chooser: Chooser | None = None
    """Chooses instead; None: the cost chooses."""
    index: PrefixIndexSettings = field(default_factory=PrefixIndexSettings)
    events: EventSettings | None = None
    """KV events to follow; None: the approximate index alone answers."""
    tokenizers: tuple[TokenizerSettings, ...] = ()
    """How prompts are tokenized, where events are followed: one for all models, or one for each."""
    added_headers: Sequence[AddedHeader] = ()
    """What responses tell clients in addition."""
    scraping: ScrapeSettings = field(default_factory=ScrapeSettings)
    flow: FlowSettings | None = None
    """How requests wait while no pod has room; None: none waits."""
    propagates_priority: bool = False
    """Whether engines are told the priorities of requests."""
    notices: tuple[Notice, ...] = ()
    """What has no effect."""

    @property
    def objectives(self) -> Mapping[str, Objective]:
        """Model or adapter → what its requests are to meet, as the cost weighs it."""
        return {
            model: make_objective(slo.ttft, slo.itl, slo.attainment)
            for model, slo in self.cost.slos.items()
        }

    @property
    def can_split(self) -> bool:
        """Whether any request is split, if the configuration enables that."""
        return self.chooser is None or self.chooser.can_split


@dataclass(frozen=True)
class Routing:
    """The part of the configuration that decides where requests go; a reload replaces it."""

    serving: DisaggregatedServing
    scheduling: Scheduling
    api: ApiPaths = field(default_factory=ApiPaths)
    """The paths that clients may request."""
    resume: ResumeLimits | None = None
    """What plans ask of the sidecars; None: nothing."""
