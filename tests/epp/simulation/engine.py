"""A simulated engine: continuous batching with chunked prefill and a prefix cache.

One step computes at most `BUDGET` tokens: one for each running decode, the rest for prompts in the
order of their arrival. Its duration is

    STEP + decodes × PER_DECODE + Σ chunk tokens × (1 + position ÷ QUADRATIC) ÷ rate

times a noise of ±10 %. The rates are a model's of about 10,000 prompt tokens per second on one GPU.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

BLOCK: Final = 512
"""Tokens per block of the prefix cache."""
BUDGET: Final = 2048
"""Tokens per step."""
STEP: Final = 0.008
"""Seconds of an empty step: launches and reading the weights."""
PER_DECODE: Final = 0.0001
"""Seconds that each running decode adds to a step."""
QUADRATIC: Final = 200_000
"""Position in a prompt at which a token costs twice as much as at its start."""
MAX_RUNNING: Final = 256
"""Requests in the batch; further ones wait."""


@dataclass(slots=True, eq=False)
class Work:
    """A request on a pod. Times in seconds; None until they happen."""

    index: int
    arrived: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Ids of the prompt's blocks; equal ids, equal prefix."""
    first_token: float | None = None
    ended: float | None = None
    hit_tokens: int = 0
    """Prompt tokens that were in the cache when the prefill began."""
    done: int = field(default=0, repr=False)
    """Prompt tokens computed or found so far."""
    generated: int = field(default=0, repr=False)


class Change(NamedTuple):
    """A request has its first token, or its answer is complete."""

    time: float
    is_end: bool
    work: Work


class PrefixCache:
    """Blocks by least recent use. The end of a prompt goes before its start, as in vLLM."""

    def __init__(self, tokens: int) -> None:
        self._capacity = tokens // BLOCK
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> int:
        """Tokens of the longest cached prefix."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK

    def use(self, blocks: Sequence[int]) -> None:
        """Insert or refresh `blocks`, the first ones as the most recent."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class Engine:
    """One pod. `advance` simulates up to a moment; the caller adds requests in order of time."""

    def __init__(self, *, rate: float, cache_tokens: int, seed: int) -> None:
        """`rate`: prompt tokens per second at the start of a prompt."""
        self.rate = rate
        self.cache = PrefixCache(cache_tokens)
        self.waiting: deque[Work] = deque()
        self.prefilling: deque[Work] = deque()
        self.decoding: list[Work] = []
        self._cache_tokens = cache_tokens
        self._random = Random(seed)
        self._clock = 0.0
        """End of the last step."""

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that requests in the batch hold."""
        held = sum(w.done + w.generated for w in (*self.prefilling, *self.decoding))
        return min(1.0, held / self._cache_tokens)

    def add(self, work: Work) -> None:
        """A request arrives, at `work.arrived`."""
        if not self.running and not self.waiting:
            self._clock = max(self._clock, work.arrived)
        self.waiting.append(work)

    def advance(self, until: float) -> list[Change]:
        """Simulate all steps that begin before `until`; what happened, in order of time. The last
        step may end after `until`."""
        changed: list[Change] = []
        while (self.running or self.waiting) and self._clock < until:
            self._admit()
            if self.prefilling:
                self._step(changed)
            else:
                self._decode_steps(until, changed)
        return changed

    def remaining_prefill_seconds(self) -> float:
        """Seconds until all prompts that are here are computed. Perfect knowledge: no router has
        this."""
        tokens = sum(w.prompt_tokens - w.done for w in self.prefilling)
        tokens += sum(w.prompt_tokens - self.cache.match(w.blocks) for w in self.waiting)
        return tokens / self.rate + self._step_seconds(tokens)

    def _step_seconds(self, tokens: int) -> float:
        return (tokens // BUDGET) * (STEP + PER_DECODE * len(self.decoding))

    def _admit(self) -> None:
        while self.waiting and self.running < MAX_RUNNING:
            work = self.waiting.popleft()
            # At least one token is computed: its result is the first token of the answer.
            work.hit_tokens = min(self.cache.match(work.blocks), work.prompt_tokens - 1)
            work.done = work.hit_tokens
            self.prefilling.append(work)

    def _step(self, changed: list[Change]) -> None:
        budget, seconds = BUDGET - len(self.decoding), STEP + PER_DECODE * len(self.decoding)
        completed = []
        for work in self.prefilling:
            chunk = min(budget, work.prompt_tokens - work.done)
            if chunk <= 0:
                break
            seconds += chunk * (1 + work.done / QUADRATIC) / self.rate
            work.done += chunk
            budget -= chunk
            self.cache.use(work.blocks[: work.done // BLOCK])
            if work.done >= work.prompt_tokens:
                completed.append(work)
        self._clock += seconds * self._random.uniform(0.9, 1.1)
        self._decode(1, changed)
        for work in completed:
            self.prefilling.remove(work)
            work.first_token = self._clock
            work.generated = 1
            changed.append(Change(self._clock, False, work))
            self.decoding.append(work)

    def _decode_steps(self, until: float, changed: list[Change]) -> None:
        """As many steps at once as nothing changes in: until an answer ends, or `until`."""
        seconds = STEP + PER_DECODE * len(self.decoding)
        most = min(w.output_tokens - w.generated for w in self.decoding)
        steps = max(1, min(most, int((until - self._clock) / seconds) + 1))
        self._clock += steps * seconds
        self._decode(steps, changed)

    def _decode(self, steps: int, changed: list[Change]) -> None:
        still = []
        for work in self.decoding:
            work.generated += steps
            if work.generated >= work.output_tokens:
                work.ended = self._clock
                changed.append(Change(self._clock, True, work))
            else:
                still.append(work)
        self.decoding = still
