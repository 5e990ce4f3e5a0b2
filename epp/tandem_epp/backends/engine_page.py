"""What one scrape of an engine's metrics page says; `page_reader` reads it."""

from dataclasses import dataclass, field

from ..estimates.engine_figures import EngineCounters, Gauges
from .adapters import AdapterSlots


@dataclass(frozen=True, slots=True)
class ScrapeResult:
    """One scrape: load, counters, and what identifies the process and its KV cache."""

    gauges: Gauges
    incarnation: bytes
    """Differs between two processes; empty when the page does not report."""
    block_tokens: int | None = None
    """KV block size in tokens; None when the page does not report."""
    blocks: int | None = None
    """KV blocks on the GPU; None when the page does not report."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    adapters: AdapterSlots | None = None
    """LoRA adapters in use; None when the page does not report: LoRA is off, or no request was
    served yet."""


@dataclass(frozen=True, slots=True)
class EnginePage:
    """A page that was read."""

    total: ScrapeResult
    """Gauges and counters summed over the ranks of the process; KV usage is averaged."""
    ranks: tuple[ScrapeResult, ...] = ()
    """One result per data-parallel rank; empty unless the page has several, numbered from 0."""
    has_load: bool = False
    """Whether the page reports running requests at all: an engine that is starting may not."""
