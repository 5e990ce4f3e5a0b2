"""What an engine tells of itself: events to an observer, gauges on request."""

from dataclasses import dataclass
from typing import Protocol

from .blocks import BlockEvent
from .types import PullResult


class EngineObserver(Protocol):
    """Who counts what the engine does; called on its event loop."""

    def record_prefix_lookup(self, queries: int, hits: int) -> None:
        """Prompt tokens looked up at admission, and found."""

    def record_external_lookup(self, queries: int, hits: int) -> None:
        """Prompt tokens asked of a producer, and loaded."""

    def record_prompt(self, computed: int, cached: int, external: int) -> None:
        """A prompt is through: where its tokens' KV came from."""

    def record_generated_tokens(self, tokens: int) -> None:
        """Tokens were chosen."""

    def record_preemption(self) -> None:
        """A sequence gave up its blocks and waits again."""

    def record_pull(self, pulled: PullResult) -> None:
        """A pull arrived whole."""

    def record_pull_failure(self) -> None:
        """Remote KV could not be loaded, or was not what the prompt needs."""

    def record_kv_expiry(self) -> None:
        """A lease ended unread."""

    def record_kv_event(self, event: BlockEvent) -> None:
        """Blocks became findable, or are so no more."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at one moment."""

    running: int
    waiting: int
    """Those waiting for remote KV included, as vLLM counts."""
    waiting_for_kv: int
    kv_usage: float
    """0 to 1."""
    free_blocks: int
    num_blocks: int
    held_requests: int
    """Finished prompts whose blocks wait for a reader."""
