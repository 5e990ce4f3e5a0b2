"""A simulated engine: continuous batching, chunked prefill, a prefix cache and preemption.

One step computes at most `Batching.budget` tokens: one for each running decode, the rest for
prompts in the order of their arrival. How long it takes, a `StepCost` says, times a noise. So a
prefill stalls the decodes beside it, and each decode slows the others. Without chunks, a step
computes whole prompts and no decode: these wait.

A prompt of which a pod's store has more than its cache waits for the load, while others are
computed, where loading takes at most half of the time of computing. A prompt that another pod
computed gets its blocks first, and waits for the KV if there is a `Link`. When the blocks run out,
the request that was admitted last loses its own and is computed again.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from copy import copy
from itertools import chain
from math import inf
from random import Random
from typing import Final, NamedTuple

from tandem_planner.step_cost import StepCost, pairs, prompt_seconds
from tandem_planner.storage import MAX_LOAD_SHARE

from .block_pool import BLOCK, BlockPool
from .link import Link
from .store import Store
from .work import Change, Work


class Batching(NamedTuple):
    """What an engine puts into one step."""

    budget: int = 2048
    """Tokens (vLLM's `--max-num-batched-tokens`)."""
    requests: int = 256
    """In the batch; further ones wait (vLLM's `--max-num-seqs`)."""
    is_chunked: bool = True
    """Whether prompts are computed in chunks beside decodes; else whole, while decodes wait."""


BATCHING: Final = Batching()


class Engine:
    """One pod. `advance` simulates up to a moment; the caller adds requests in order of time."""

    def __init__(
        self,
        speed: StepCost,
        *,
        cache_tokens: int,
        seed: int,
        store: Store | None = None,
        batching: Batching = BATCHING,
        link: Link | None = None,
        noise: float = 0.1,
    ) -> None:
        """`link`: what KV of other pods comes over, once it has blocks here; None: it is here when
        its request arrives. `noise`: largest deviation of a step from `speed`, as a share."""
        self.speed, self.store, self.batching, self.link = speed, store, batching, link
        self._noise = noise
        self.pool = BlockPool(cache_tokens)
        self.waiting: deque[Work] = deque()
        self.loading: list[tuple[float, int, Work]] = []
        """Heap: when the KV of an admitted request is there, a number for ties, the request."""
        self.prefilling: deque[Work] = deque()
        self.decoding: list[Work] = []
        """In the order in which they were admitted."""
        self.gaps: list[tuple[float, int]] = []
        """Seconds between two tokens, and how many decodes saw this gap."""
        self._stalled, self._stalled_decodes = 0.0, 0
        """Seconds of steps without decodes since the last one with, and how many decodes wait."""
        self.busy = 0.0
        """Seconds of all steps."""
        self.context = 0
        """KV tokens of all decodes."""
        self._coming: Counter[int] = Counter()
        """Blocks of prompts that are not computed yet."""
        self.totals = dict.fromkeys(COUNTED, 0.0)
        """What vLLM's metrics page counts: prefills and queues at a request's end."""
        self._ends: list[tuple[int, int, Work]] = []
        """Heap: step at which an answer is complete, a number for ties, the request."""
        self._step_count = 0
        self._random = Random(seed)
        self._clock = 0.0
        """End of the last step."""

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self.loading) + len(self.prefilling) + len(self.decoding)

    def cached_tokens(self, work: Work) -> int:
        """Prompt tokens that need no prefill here now. At least one token is computed: its result
        is the first token of the answer."""
        return min(self.pool.match(work.blocks) * BLOCK, work.prompt_tokens - 1)

    def works(self) -> Iterator[Work]:
        """The requests that are here."""
        loading = (load[2] for load in self.loading)
        return chain(self.waiting, loading, self.prefilling, self.decoding)

    def fork(self) -> "Engine":
        """An engine in the same state, with copies of the requests, whose steps have no noise;
        it knows no store."""
        twin = Engine(self.speed, cache_tokens=0, seed=0, batching=self.batching)
        copies = {id(work): copy(work) for work in self.works()}
        twin.pool, twin.context, twin._clock = self.pool.copy(), self.context, self._clock
        twin.waiting = deque(copies[id(work)] for work in self.waiting)
        twin.loading = [(at, number, copies[id(work)]) for at, number, work in self.loading]
        twin.prefilling = deque(copies[id(work)] for work in self.prefilling)
        twin.decoding = [copies[id(work)] for work in self.decoding]
        twin._ends = [(step, number, copies[id(work)]) for step, number, work in self._ends]
        twin._coming, twin.totals = self._coming.copy(), self.totals.copy()
        twin._step_count, twin._random = self._step_count, _Mean(0)
        return twin

    def add(self, work: Work) -> None:
        """A request arrives, at `work.arrived`."""
        if not self.running and not self.waiting:
            self._clock = max(self._clock, work.arrived)
        work.expected = work.prompt_tokens - 1 if work.is_remote else self.tokens_in_turn(work)
        self._coming.update(work.blocks)
        self.waiting.append(work)

    def advance(self, until: float) -> list[Change]:
        """Simulate all steps that begin before `until`; what happened, in order of time. The last
        step may end after `until`."""
        changed: list[Change] = []
        while self._clock < until and (self.running or self.waiting):
            self._end_loads()
            if self.prefilling or (self.waiting and self._can_admit(self.waiting[0])):
                self._mixed_step(changed)
            elif self.decoding:
                self._decode_steps(min([until, *(load[0] for load in self.loading)]), changed)
            elif self.loading:
                self._clock = self.loading[0][0]
            else:
                raise ValueError("a prompt is larger than the KV cache of its pod")
        return changed

    def quiet_until(self) -> float:
        """A time before which no answer ends, if no request is added."""
        if self.waiting or self.prefilling or self.loading:
            return self._clock
        if not self.decoding:
            return inf
        steps = self._ends[0][0] - self._step_count
        return self._clock + steps * self.decode_step_seconds() * (1.0 - self._noise)

    def tokens_in_turn(self, work: Work) -> int:
        """Prompt tokens that will be cached when all that is here is computed. Perfect knowledge:
        no router has this, nor what follows."""
        count = 0
        for block in work.blocks:
            if block not in self._coming and block not in self.pool:
                break
            count += 1
        return min(count * BLOCK, work.prompt_tokens - 1)

    def remaining_prefill_seconds(self) -> float:
        """Seconds until all prompts that are here are computed."""
        ranges = [(w.done, w.length) for w in self.prefilling]
        ranges += [(w.expected, w.prompt_tokens) for w in self.waiting]
        tokens = sum(end - start for start, end in ranges)
        seconds = sum(self._chunk_seconds(start, end) for start, end in ranges)
        return seconds + tokens / self.batching.budget * self.decode_step_seconds()

    def decode_step_seconds(self) -> float:
        """Seconds of a step without a prefill, on average."""
        return self.speed.seconds(len(self.decoding), self.context)

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute a prompt's tokens from `start` to `end` while nothing else runs."""
        return prompt_seconds(self.speed, start, end, self.batching.budget)

    def _chunk_seconds(self, start: int, end: int) -> float:
        """Seconds that these tokens of a prompt add to a step."""
        tokens, looks = end - start, pairs(start, end)
        return self.speed.seconds(0, 0, tokens, looks) - self.speed.seconds(0, 0)

    def _can_admit(self, work: Work) -> bool:
        if self.running >= self.batching.requests:
            return False
        shared = self.pool.match(work.blocks)
        # Some room stays free for the answers in the batch, or they would preempt it at once.
        reserve = BLOCK + self.pool.capacity // 100 if self.running else 0
        return self.pool.has_room(_total_tokens(work) - shared * BLOCK + reserve)

    def _admit(self, work: Work) -> bool:
        """The request gets its blocks, and is computed or waits for KV first; whether it is."""
        is_received = work.is_remote and self.link is not None
        is_here = work.is_remote and not is_received
        cached = work.prompt_tokens - 1 if is_here else self.cached_tokens(work)
        if work.started is None:
            work.started, work.hit_tokens = self._clock, cached
        shared = self.pool.match(work.blocks[: work.prompt_tokens // BLOCK])
        work.shared, work.done, work.length = shared, cached, _total_tokens(work)
        self.pool.private += work.length - shared * BLOCK
        self.pool.use(work.blocks[:shared])
        if is_received and self.link is not None:
            work.loaded_tokens = work.prompt_tokens - 1 - cached
            at = self.link.receive(work, work.prompt_tokens - cached, self._clock)
        elif not work.is_remote and (tokens := self._worth_loading(work, cached)):
            seconds = self.store.seconds(tokens) if self.store is not None else 0.0
            work.loaded_tokens, at = tokens, self._clock + seconds
            self._count_load(tokens, seconds)
        else:
            self.prefilling.append(work)
            return True
        heapq.heappush(self.loading, (at, work.index, work))
        return False

    def _worth_loading(self, work: Work, cached: int) -> int:
        """Tokens of the prompt, beyond the cached ones, that the pod loads."""
        if self.store is None or work.first_token is not None:
            return 0
        stored = min(self.store.tokens(work.blocks), work.prompt_tokens - 1)
        if stored <= cached:
            return 0
        computing = self.prefill_seconds(cached, stored)
        is_worth_it = self.store.seconds(stored - cached) <= MAX_LOAD_SHARE * computing
        return stored - cached if is_worth_it else 0

    def _end_loads(self) -> None:
        while self.loading and self.loading[0][0] <= self._clock:
            _, _, work = heapq.heappop(self.loading)
            work.done += work.loaded_tokens
            work.started, work.hit_tokens = self._clock, work.done
            self._share_blocks(work)
            self.prefilling.append(work)

    def _count_load(self, tokens: int, seconds: float) -> None:
        self.totals["loads"] += 1
        self.totals["load_seconds"] += seconds
        self.totals["loaded_tokens"] += tokens
        if self.store is not None:
            self.totals["loaded_bytes"] += tokens * self.store.kv_bytes

    def _mixed_step(self, changed: list[Change]) -> None:
        """A step with prompts; without chunks no decode is in it."""
        is_chunked = self.batching.is_chunked
        decodes, context = (len(self.decoding), self.context) if is_chunked else (0, 0)
        room, tokens, looks = self.batching.budget - decodes, 0, 0.0
        completed: list[Work] = []
        for work in self.prefilling:
            chunk, seen = self._chunk(work, room - tokens)
            tokens, looks = tokens + chunk, looks + seen
            if work.done >= work.length:
                completed.append(work)
        while self.waiting and self._is_next(self.waiting[0], tokens, room):
            work = self.waiting.popleft()
            if not self._admit(work):
                continue
            chunk, seen = self._chunk(work, room - tokens)
            tokens, looks = tokens + chunk, looks + seen
            if work.done >= work.length:
                completed.append(work)
        if not tokens and not decodes:
            # All that was admitted waits for KV.
            return
        seconds = self.speed.seconds(decodes, context, tokens, looks) * self._deviation(self._noise)
        self._finish_steps(1 if is_chunked else 0, seconds, changed)
        for work in completed:
            # A request whose blocks ran out at this very step is in the queue again.
            if work in self.prefilling:
                self.prefilling.remove(work)
                self._join_decodes(work, changed)

    def _is_next(self, work: Work, tokens: int, room: int) -> bool:
        """Whether a step with `tokens` prompt tokens takes `work` too."""
        if not self.batching.is_chunked and tokens:
            return tokens + work.prompt_tokens <= room and self._can_admit(work)
        return tokens < room and self._can_admit(work)

    def _chunk(self, work: Work, room: int) -> tuple[int, float]:
        """Compute up to `room` tokens of `work`, or all without chunks: its tokens and looks."""
        left = work.length - work.done
        chunk = min(room, left) if self.batching.is_chunked else left
        if chunk <= 0:
            return 0, 0.0
        looks = pairs(work.done, work.done + chunk)
        work.done += chunk
        self.totals["computed_tokens"] += chunk
        self._share_blocks(work)
        return chunk, looks

    def _deviation(self, noise: float) -> float:
        return self._random.uniform(1.0 - noise, 1.0 + noise)

    def _share_blocks(self, work: Work) -> None:
        """Whole blocks of the prompt can be found by others from now on."""
        whole = min(work.done, work.prompt_tokens) // BLOCK
        added = work.blocks[work.shared : whole]
        self.pool.private -= len(added) * BLOCK
        self.pool.use(added)
        work.shared += len(added)
        if self.store is not None:
            self.store.add(added)

    def _join_decodes(self, work: Work, changed: list[Change]) -> None:
        if not work.generated:
            self._coming.subtract(work.blocks)
            for block in work.blocks:
                if not self._coming[block]:
                    del self._coming[block]
        work.generated += 1
        work.joined = self._step_count
        self.totals["generated_tokens"] += 1
        if work.first_token is None:
            work.first_token = self._clock
            changed.append(Change(self._clock, False, work))
        self.decoding.append(work)
        self.context += work.length
        left = work.output_tokens - work.generated
        heapq.heappush(self._ends, (self._step_count + left, work.index, work))
        self._end_completed(changed)

    def _decode_steps(self, until: float, changed: list[Change]) -> None:
        """As many steps at once as nothing changes in: until an answer ends, or `until`."""
        decodes, seconds = len(self.decoding), self.decode_step_seconds()
        most = self._ends[0][0] - self._step_count
        if self._noise:
            most = min(most, _MAX_STEPS)
        steps = max(1, min(most, int((until - self._clock) / seconds) + 1))
        # Each step reads a token more of each decode: on average, half of what the last one does.
        seconds = self.speed.seconds(decodes, self.context + decodes * (steps - 1) / 2)
        self._finish_steps(steps, steps * seconds * self._deviation(self._noise / 2), changed)

    def _finish_steps(self, steps: int, seconds: float, changed: list[Change]) -> None:
        """Advance the clock; every decode has `steps` more tokens. 0: a step without decodes."""
        self._clock += seconds
        self.busy += seconds
        if not steps and self.decoding:
            self._stalled_decodes = len(self.decoding)
            self._stalled += seconds
        self._step_count += steps
        if not self.decoding:
            return
        if steps:
            self._count_tokens(steps, seconds)
        self._end_completed(changed)
        # What is being loaded keeps its blocks.
        while not self.pool.has_room(0) and len(self.prefilling) + len(self.decoding) > 1:
            self._preempt()
        self.pool.evict()

    def _count_tokens(self, steps: int, seconds: float) -> None:
        decodes, gap = len(self.decoding), seconds / steps
        tokens = steps * decodes
        if self._stalled:
            stalled = min(self._stalled_decodes, decodes)
            self.gaps += [(gap + self._stalled, stalled), (gap, tokens - stalled)]
            self._stalled = 0.0
        else:
            self.gaps.append((gap, tokens))
        self.totals["generated_tokens"] += tokens
        self.totals["itls"] += tokens
        self.totals["itl_seconds"] += seconds * decodes
        self.context += tokens
        self.pool.private += tokens

    def _end_completed(self, changed: list[Change]) -> None:
        while self._ends and self._ends[0][0] <= self._step_count:
            work = heapq.heappop(self._ends)[2]
            self._leave(work)
            work.ended = self._clock
            self._count_end(work)
            changed.append(Change(self._clock, True, work))

    def _leave(self, work: Work) -> None:
        """Take a decode out of the batch and return its KV to the pool."""
        self.decoding.remove(work)
        generated = self._step_count - work.joined
        work.generated += generated
        self.context -= work.length + generated
        self._free(work, generated)

    def _free(self, work: Work, generated: int) -> None:
        self.pool.private -= work.length + generated - work.shared * BLOCK
        self.pool.release(work.blocks[: work.shared])
        work.shared = 0

    def _count_end(self, work: Work) -> None:
        if work.started is None or work.first_token is None:
            return
        self.totals["queue_seconds"] += work.started - work.arrived
        self.totals["queued"] += 1
        self.totals["prefill_seconds"] += work.first_token - work.started
        self.totals["prefills"] += 1
        self.totals["prefill_tokens"] += work.prompt_tokens - work.hit_tokens

    def _preempt(self) -> None:
        """Stop the request that was admitted last; it is computed again, answer included."""
        if self.prefilling:
            work = self.prefilling.pop()
            self._free(work, 0)
        else:
            work = self.decoding[-1]
            self._leave(work)
            self._ends = [end for end in self._ends if end[2] is not work]
            heapq.heapify(self._ends)
        work.preemptions += 1
        work.is_remote = False
        self.totals["preemptions"] += 1
        self.waiting.appendleft(work)


class _Mean(Random):
    """Draws the mean."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def _total_tokens(work: Work) -> int:
    """Tokens to compute before the next token of the answer."""
    # The last token has no KV yet.
    return work.prompt_tokens + max(0, work.generated - 1)


_MAX_STEPS: Final = 32
"""Decode steps at once that have one deviation in common."""
COUNTED: Final = (
    "prefill_seconds", "prefills", "prefill_tokens", "computed_tokens", "queue_seconds", "queued",
    "itl_seconds", "itls", "generated_tokens", "preemptions", "loads", "load_seconds",
    "loaded_tokens", "loaded_bytes",
)  # fmt: skip
