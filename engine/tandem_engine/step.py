"""A sequence's state, and the frozen pieces of it that the worker thread gets in a step."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams

from .types import PullResult, RemoteDecode, Request, SamplingParams, TokenLogprobs


class Phase(Enum):
    """The scheduling state of a sequence. Only the scheduler changes it."""

    WAITING = auto()
    """Queued: it has no blocks yet, or its KV has come and no place in a step is free."""
    LOADING = auto()
    """A pull or a load is filling its blocks."""
    RUNNING = auto()
    """It has its blocks and a place in every step."""
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample the token after a chunk; from equal logits, equal draws sample equal tokens."""

    sampling: SamplingParams
    seed: int
    index: int
    """Tokens generated for this request so far."""
    banned: frozenset[int] = frozenset()
    """Token ids that would end the request before min_tokens."""


@dataclass(slots=True)
class Rear:
    """Tokens whose KV a load brings, from the last chunk on, while those before are computed.

    The load may lower `start` to a place at or after `front`, and raises it when it ends early."""

    start: int
    """The first of these tokens: the tokens before it are computed."""
    end: int
    """Tokens with KV once the load has ended and the tokens before `start` are computed."""
    front: int
    """Tokens that are computed, or that a running step computes."""
    is_loading: bool = True
    """Whether a thread may write into the blocks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. `tokens[:computed_tokens]` have their KV in the cache."""

    request: Request
    order: int
    """Position in first-come order; a preempted sequence keeps it."""
    seed: int
    stops: frozenset[int]
    """Token ids that end the request."""
    arrival_time: float
    """time.perf_counter() at submission."""
    transfer_params: TransferParams | None = None
    """Where to pull the prompt's KV from; None once it was pulled, failed or is not needed."""
    tokens: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks of `tokens`; extended when the scheduler needs more."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the cache; 0 again after a preemption."""
    phase: Phase = Phase.WAITING
    aborted: bool = False
    """Its last delta is sent; it is removed when the step or pull that uses its blocks ends."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    pull: PullResult | None = None
    """The pull, or the load from host memory and storage, that brought KV; None: none did."""
    arriving_tokens: int | None = None
    """Leading tokens whose KV a load brings layer by layer, from now on; see `tiers.arriving`.
    None: it has no such load, or its end is to be awaited."""
    rear: Rear | None = None
    """The part of its KV that a load brings while the part before is computed; see `tiers.rear`."""
    load_limit: float | None = None
    """Seconds to load the stored KV that its hand-off names; None: it names none."""
    saved_chunks: int = 0
    """Leading chunks that were given to the KV tiers; see `tiers`."""
    start_time: float | None = None
    """time.perf_counter() when its first chunk began."""
    overlapped: float = 0.0
    """Seconds of its load after that."""
    waited: float = 0.0
    """Seconds after that in which nothing of it could be computed until its load went on."""

    def __post_init__(self) -> None:
        # A copy: generated tokens are appended, and the request is frozen.
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that were not in the prefix cache at first admission."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed_tokens

    @property
    def is_remote_decode(self) -> bool:
        """Whether it is a prefill for a remote decode: one token, then its KV is held."""
        return isinstance(self.request.kv, RemoteDecode)

    @property
    def max_tokens(self) -> int:
        return 1 if self.is_remote_decode else self.request.sampling.max_tokens

    @property
    def pulled_tokens(self) -> int:
        """Prompt tokens whose KV a pull or a load brought."""
        return self.pull.tokens if self.pull is not None else 0

    @property
    def local_tokens(self) -> int:
        """Prompt tokens neither cached, pulled nor loaded. As in vLLM's counters, a last
        token whose KV was pulled is none of them, although it is computed again."""
        return max(0, self.uncached_tokens - self.pulled_tokens)

    def first_token_timing(self, now: float) -> Timing:
        """The timing of the first token, sampled at `now` (time.perf_counter())."""
        start, pull = self.start_time or self.arrival_time, self.pull
        pull_seconds = pull.seconds if pull is not None else 0.0
        # Before the first chunk, a pull's time is reported as transfer, not as queue.
        queue = max(0.0, start - self.arrival_time - max(0.0, pull_seconds - self.overlapped))
        return Timing(
            # A wait for a load that brought nothing delayed it as a queue does.
            queue=queue if pull is not None else queue + self.waited,
            compute=now - start - self.waited,
            cached=self.cached_tokens,
            # The last token is always computed: after a pull of the whole prompt, too.
            computed=max(1, self.local_tokens),
            transfer=pull_seconds if pull is not None else None,
            bytes=pull.bytes if pull is not None else None,
        )

    def draw(self) -> Draw:
        """How its next token is sampled."""
        sampling = self.request.sampling
        # As in vLLM, a stop token is impossible, rather than ignored, below min_tokens.
        early = self.generated_tokens < sampling.min_tokens
        banned = self.stops if early else frozenset()
        return Draw(sampling, self.seed, self.generated_tokens, banned)


def new_sequence(
    request: Request, order: int, source: Random, eos_token_ids: tuple[int, ...]
) -> Sequence:
    """A sequence that arrives now; `source` gives a seed to a request without one."""
    sampling = request.sampling
    stops = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids))
    return Sequence(
        request=request,
        order=order,
        seed=source.getrandbits(63) if sampling.seed is None else sampling.seed,
        # A prefill for a remote decode ends after one token in any case.
        stops=frozenset() if isinstance(request.kv, RemoteDecode) else stops,
        arrival_time=time.perf_counter(),
        transfer_params=request.kv if isinstance(request.kv, TransferParams) else None,
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute in one step; everything before `start` is cached."""

    sequence: Sequence
    """For the event loop only: the worker thread must not read it, as the loop changes it."""
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    """The blocks of tokens 0 to `end`."""
    draw: Draw | None
    """None: more of the prompt follows, so no token is sampled."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token sampled after a chunk."""

    token: int
    logprobs: TokenLogprobs | None = None
