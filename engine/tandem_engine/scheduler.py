"""Plans which tokens of which sequences run in the next step. No torch, no clock, no I/O.

First come, first served. A step takes the next token of every decode, then chunks of prompts whose
prefill has begun, then new sequences, within the limits of tokens per step, sequences per step and
free blocks. A prompt gets all its blocks when it is admitted, so only decodes can run out of
blocks; the scheduler then preempts the youngest running sequence, which is computed again later.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from tandem_contract.transfer_params import TransferParams

from .blocks import BlockManager, extend_hash_chain
from .step import Chunk, Phase, Sequence

_order = attrgetter("order")


@dataclass(slots=True)
class Step:
    """One step's work, and the changes that the engine has to act on before it runs."""

    budget: int
    """Tokens that still fit into the step."""
    max_chunk: int
    """Most tokens of one sequence."""
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that got blocks for the first time; their `cached_tokens` are set."""
    pulls: list[Sequence] = field(default_factory=list)
    """Sequences that got blocks for remote KV, which is to be pulled now."""
    unneeded_transfers: list[tuple[Sequence, TransferParams]] = field(default_factory=list)
    """Sequences whose remote KV is to be released unread: the prompt is cached here."""
    tier_loads: list[Sequence] = field(default_factory=list)
    """Sequences that got blocks into which KV is to be loaded from host memory or storage now."""
    awaiting_rear: list[Sequence] = field(default_factory=list)
    """Sequences that are computed up to where a load brings the rest, and that wait for it."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their blocks and wait again."""
    arriving: Sequence | None = None
    """The only sequence of a step that waits in each layer for stored KV; None: no other step."""


class Scheduler:
    """Owns the queues. A sequence is in exactly one of the four lists until `remove`.

    Raises nothing: a sequence that cannot run yet waits.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_seqs: int,
        max_tokens: int,
        max_chunk: int | None = None,
        may_load: Callable[[Sequence], bool] = lambda _: False,
    ) -> None:
        """`max_chunk`: most tokens of one sequence in a step, if there are others; None: all that
        fit. `may_load`: whether to try to load KV for a sequence that got its blocks."""
        self._blocks = blocks
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._max_chunk = max_tokens if max_chunk is None else max_chunk
        self._may_load = may_load
        self._waiting: list[Sequence] = []
        # Has blocks, but its KV is being pulled or loaded: it takes no place in a step.
        self._loading: list[Sequence] = []
        # Has blocks and KV, and waits for a place in the steps.
        self._loaded: list[Sequence] = []
        self._running: list[Sequence] = []

    @property
    def running(self) -> int:
        """Sequences that run in the steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for blocks or for a place in the steps."""
        return len(self._waiting) + len(self._loaded)

    @property
    def loading(self) -> int:
        """Sequences whose KV is being pulled or loaded."""
        return len(self._loading)

    def __iter__(self) -> Iterator[Sequence]:
        for group in (self._running, self._loaded, self._loading, self._waiting):
            yield from group

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        insort(self._waiting, seq, key=_order)

    def schedule(self) -> Step:
        """Plan the next step; `chunks` is empty when nothing can run."""
        # A prompt that is alone delays nothing.
        is_alone = self.running + self.waiting + self.loading <= 1
        step = Step(self._max_tokens, self._max_tokens if is_alone else self._max_chunk)
        decodes = [seq for seq in self._running if seq.pending_tokens == 1]
        # Sequences with more than one token left: a running prefill, or one that was preempted.
        prefills = [seq for seq in self._running if seq.pending_tokens > 1]
        # Decodes first, for a steady time between tokens. A preemption removes sequences from
        # `_running` meanwhile; the phase tells which ones.
        for seq in (*decodes, *prefills):
            if step.budget and seq.phase is Phase.RUNNING and self._extend_or_preempt(seq, step):
                self._add_chunk(seq, step, seq.computed_tokens)
        # Their blocks are allocated and their KV is here: only a place in the step is needed.
        while self._loaded and self._has_slot(step):
            self._start(self._loaded.pop(0), step)
        # A preempted sequence is older than any other that waits: it must get the next free blocks.
        if not step.preempted:
            self._admit(step)
        # Only when nothing else can run: such a step may wait for the store.
        if not step.chunks:
            step.arriving = next((s for s in self._loading if s.arriving_tokens is not None), None)
            if step.arriving is not None and step.arriving.arriving_tokens is not None:
                self._add_chunk(step.arriving, step, step.arriving.arriving_tokens)
        return step

    def finish_loading(self, seq: Sequence, computed: int) -> None:
        """Queue a sequence whose pull or load has ended: its first `computed` tokens have their KV.

        The other tokens are computed here, but for those of a rear that is still being loaded; a
        second call tells that its load has ended. The sequence keeps its blocks meanwhile.
        """
        if seq.phase is not Phase.LOADING:
            self._skip_rear(seq)
            return
        self._loading.remove(seq)
        seq.phase, seq.transfer_params = Phase.WAITING, None
        self._set_computed(seq, computed)
        insort(self._loaded, seq, key=_order)

    def advance(self, chunk: Chunk, token: int | None) -> None:
        """Take in a computed chunk and, after the last chunk of the prompt, the sampled `token`."""
        if chunk.sequence in self._loaded:
            # Computed while its KV arrived, in a step of its own.
            self._loaded.remove(chunk.sequence)
            self._set_running(chunk.sequence)
        self._set_computed(chunk.sequence, chunk.end)
        self._skip_rear(chunk.sequence)
        if token is not None:
            chunk.sequence.tokens.append(token)

    def remove(self, seq: Sequence, *, hold: bool = False) -> None:
        """Take a sequence out of its queue; free its blocks, or hold them under its id."""
        for group in (self._running, self._loaded, self._loading, self._waiting):
            if seq in group:
                group.remove(seq)
        seq.phase = Phase.ENDED
        if hold:
            self._blocks.hold(seq.id)
        else:
            self._blocks.free(seq.id)

    def _skip_rear(self, seq: Sequence) -> None:
        """Go on after the rear if it is loaded and the tokens before it are computed."""
        rear = seq.rear
        if rear is not None and not rear.is_loading and seq.computed_tokens == rear.start:
            seq.rear = None
            self._set_computed(seq, rear.end)

    def _set_computed(self, seq: Sequence, computed: int) -> None:
        seq.computed_tokens = computed
        salt = seq.request.cache_salt
        if computed // self._blocks.block_size > len(seq.chain):
            extend_hash_chain(seq.chain, seq.tokens, self._blocks.block_size, salt)
        # From now on other prompts find these blocks, also while this sequence runs.
        self._blocks.register(seq.id, seq.chain, seq.tokens, computed, salt)

    def _has_slot(self, step: Step) -> bool:
        return step.budget > 0 and len(self._running) < self._max_seqs

    def _extend_or_preempt(self, seq: Sequence, step: Step) -> bool:
        """Get blocks for every token of `seq`, preempting younger sequences when none are free.

        Returns False when `seq` itself was preempted.
        """
        while not self._blocks.extend(seq.id, self._blocks.blocks_for(len(seq.tokens))):
            # `_running` is in order of arrival: the last one is the youngest, at worst `seq`. A
            # rear that is loaded is written into; `seq` has none: a prompt never needs more blocks.
            victim = next(s for s in reversed(self._running) if not (s.rear and s.rear.is_loading))
            self._running.remove(victim)
            # Full blocks stay cached until eviction, so often only a part is computed again.
            self._blocks.free(victim.id)
            victim.phase, victim.computed_tokens, victim.rear = Phase.WAITING, 0, None
            victim.preemptions += 1
            insort(self._waiting, victim, key=_order)
            step.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, step: Step) -> None:
        while self._waiting:
            seq = self._waiting[0]
            # A pull needs blocks, but no place in the step: it starts while the step is full.
            if seq.transfer_params is None and not self._has_slot(step):
                return
            if not self._allocate(seq, step):
                # Smaller requests behind it do not overtake: it would starve under load.
                return
            # Only now, with its blocks allocated: a failed attempt leaves the queue unchanged.
            self._waiting.pop(0)
            if seq.transfer_params is not None:
                seq.phase = Phase.LOADING
                self._loading.append(seq)
                step.pulls.append(seq)
            elif not seq.preemptions and self._may_load(seq):
                seq.phase = Phase.LOADING
                self._loading.append(seq)
                step.tier_loads.append(seq)
            elif self._has_slot(step):
                self._start(seq, step)
            else:
                insort(self._loaded, seq, key=_order)

    def _allocate(self, seq: Sequence, step: Step) -> bool:
        size = self._blocks.block_size
        extend_hash_chain(seq.chain, seq.tokens, size, seq.request.cache_salt)
        matched = self._blocks.match_prefix(seq.chain)
        # All but the last token, which is computed here in any case: a pull saves nothing.
        is_cached = len(matched) * size >= len(seq.tokens) - 1
        if len(matched) * size == len(seq.tokens):
            matched.pop()  # the last token is always computed: its logits choose the next one
        if not self._blocks.allocate(seq.id, matched, self._blocks.blocks_for(len(seq.tokens))):
            return False
        seq.computed_tokens = len(matched) * size
        # Metrics count a prompt once, at its first admission.
        if not seq.preemptions:
            seq.cached_tokens = seq.computed_tokens
            step.admitted.append(seq)
        if seq.transfer_params is not None and is_cached:
            step.unneeded_transfers.append((seq, seq.transfer_params))
            seq.transfer_params = None
        return True

    def _start(self, seq: Sequence, step: Step) -> None:
        self._set_running(seq)
        self._add_chunk(seq, step, seq.computed_tokens)

    def _set_running(self, seq: Sequence) -> None:
        seq.phase = Phase.RUNNING
        insort(self._running, seq, key=_order)

    def _add_chunk(self, seq: Sequence, step: Step, start: int) -> None:
        # A longer prompt goes on in the next steps (chunked prefill).
        end = min(len(seq.tokens), start + min(step.budget, step.max_chunk))
        if seq.rear is not None:
            end = min(end, seq.rear.start)
            if end <= start:
                step.awaiting_rear.append(seq)
                return
            seq.rear.front = end
        step.budget -= end - start
        step.chunks.append(
            Chunk(
                sequence=seq,
                token_ids=tuple(seq.tokens[start:end]),
                start=start,
                blocks=self._blocks.table(seq.id)[: self._blocks.blocks_for(end)],
                # Only the chunk that reaches the last token has logits to sample from.
                draw=seq.draw() if end == len(seq.tokens) else None,
            )
        )
