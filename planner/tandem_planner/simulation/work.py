"""A request of a workload, the same on a simulated pod, and what happens to it there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Request(NamedTuple):
    """A request of a workload; lengths in tokens."""

    at: float
    """Seconds."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    """Ids of the prompt's blocks of `block_pool.BLOCK` tokens; equal ids, equal prefix."""
    only: int | None = None
    """Index of the one pod that the gateway's subset hint allows; None allows all."""
    is_computed: bool = False
    """Whether the pod that answers has the prompt's KV already."""

    def work(self, index: int, now: float) -> "Work":
        """The request on a pod, arriving at `now`."""
        work = Work(index, now, self.prompt_tokens, self.output_tokens, self.blocks, self.only)
        work.is_remote = self.is_computed
        return work


@dataclass(slots=True, eq=False)
class Work:
    """A request on a pod. Times in seconds; None until they happen."""

    index: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Ids of the prompt's blocks; equal ids, equal prefix."""
    only: int | None = None
    """Index of the one pod that the gateway allows; None allows all."""
    is_remote: bool = False
    """Whether the prompt's KV came from another pod: only the last token is computed here."""
    prefill_seconds: float = 0.0
    """How long the other pod computed the prompt, if it `is_remote`."""
    started: float | None = None
    """When the prefill began."""
    first_token: float | None = None
    ended: float | None = None
    hit_tokens: int = 0
    """Prompt tokens that were in the cache when the prefill began, loaded ones included."""
    loaded_tokens: int = 0
    """Prompt tokens that the pod loaded from its store."""
    preemptions: int = 0
    expected: int = field(default=0, repr=False)
    """Prompt tokens that will be cached when its turn comes, as known at its arrival."""
    done: int = field(default=0, repr=False)
    """Tokens whose KV exists: of the prompt, and of the answer after a preemption."""
    length: int = field(default=0, repr=False)
    """Tokens to compute before the next token of the answer."""
    generated: int = field(default=0, repr=False)
    joined: int = field(default=0, repr=False)
    """The step after which it decodes."""
    shared: int = field(default=0, repr=False)
    """Leading blocks that it uses in the pool; the rest of its KV is private."""

    @property
    def itl(self) -> float | None:
        """Mean seconds between two tokens; None for an answer of one token."""
        if self.first_token is None or self.ended is None or self.output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.output_tokens - 1)


class Change(NamedTuple):
    """A request has its first token, or its answer is complete."""

    time: float
    is_end: bool
    work: Work
