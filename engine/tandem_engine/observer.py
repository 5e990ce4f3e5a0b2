"""The engine's reports: events to an `EngineObserver`, and `Stats` on request."""

from dataclasses import dataclass
from typing import Protocol

from tandem_kvstore.client import Observer

from .blocks import BlockEvent, BlockManager
from .scheduler import Scheduler
from .types import PullResult, Tier


class EngineObserver(Observer, Protocol):
    """Counts what the engine does. The engine calls it on its event loop."""

    def record_prefix_lookup(self, queries: int, hits: int) -> None:
        """A new sequence looked up `queries` prompt tokens in the prefix cache, found `hits`."""

    def record_external_lookup(self, queries: int, hits: int) -> None:
        """`queries` prompt tokens were to be pulled from a producer; `hits` were loaded."""

    def record_prompt(self, computed: int, cached: int, external: int) -> None:
        """A prompt is complete; the number of its tokens by where their KV came from."""

    def record_generated_tokens(self, tokens: int) -> None:
        """`tokens` tokens were generated."""

    def record_preemption(self) -> None:
        """A sequence was preempted: it lost its blocks and waits again."""

    def record_pull(self, pulled: PullResult) -> None:
        """A KV pull succeeded."""

    def record_pull_failure(self) -> None:
        """Remote KV could not be loaded, or does not belong to the prompt."""

    def record_kv_expiry(self) -> None:
        """A lease ended before a reader fetched the KV."""

    def record_tier_load(self, tier: Tier, tokens: int) -> None:
        """KV of `tokens` tokens was loaded from a tier."""

    def record_tier_store(self, tier: Tier, tokens: int) -> None:
        """KV of `tokens` tokens was written to a tier."""

    def record_host_tier(self, size: int) -> None:
        """The host tier has `size` bytes of KV now."""

    def record_kv_event(self, event: BlockEvent) -> None:
        """The prefix cache gained or lost blocks."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine's gauges at one moment."""

    running: int
    """Sequences that run in the steps."""
    waiting: int
    """Sequences that wait, those for remote KV included, as vLLM counts them."""
    waiting_for_kv: int
    """Sequences that wait for remote KV."""
    kv_usage: float
    """Share of KV blocks in use or held, 0 to 1."""
    free_blocks: int
    """KV blocks that can be allocated, evictable ones included."""
    num_blocks: int
    """KV blocks of the cache."""
    held_requests: int
    """Finished prompts whose KV is held for a reader."""


def current_stats(scheduler: Scheduler, blocks: BlockManager) -> Stats:
    """The gauges now."""
    return Stats(
        running=scheduler.running,
        waiting=scheduler.waiting + scheduler.loading,
        waiting_for_kv=scheduler.loading,
        kv_usage=blocks.usage,
        free_blocks=blocks.free_count,
        num_blocks=blocks.num_blocks,
        held_requests=blocks.hold_count,
    )
