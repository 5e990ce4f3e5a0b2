"""What one step works on: a sequence's state, and the frozen pieces the worker thread is given."""

from dataclasses import dataclass, field
from enum import Enum, auto

from tandem_contract.transfer_params import TransferParams

from .types import PullResult, RemoteDecode, Request, SamplingParams, TokenLogprobs


class Phase(Enum):
    """Where a sequence stands; only the scheduler moves it."""

    WAITING = auto()
    """Queued: without blocks, or loaded and without a place in the step."""
    LOADING = auto()
    """Its blocks are being filled by a pull."""
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose the token after a chunk; the same draw always chooses the same token."""

    sampling: SamplingParams
    seed: int
    index: int
    """Tokens chosen for this request so far."""
    banned: frozenset[int] = frozenset()
    """Token ids that would end the request before min_tokens."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way. `tokens[:computed_tokens]` have their KV in the cache."""

    request: Request
    order: int
    """Place in first-come order, kept through preemption."""
    seed: int
    stops: frozenset[int]
    """Token ids that end it."""
    arrival_time: float
    """Clock at admission, seconds."""
    transfer_params: TransferParams | None = None
    """KV still to be pulled; None once loaded, failed or not needed."""
    tokens: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `tokens`, as far as they were needed."""
    computed_tokens: int = 0
    phase: Phase = Phase.WAITING
    aborted: bool = False
    """Ends after the step that is running it."""
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    pull: PullResult | None = None
    start_time: float | None = None
    """Clock when its first chunk began, seconds."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def generated_tokens(self) -> int:
        """Tokens chosen so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens to compute before the next one can be chosen; 1 while decoding."""
        return len(self.tokens) - self.computed_tokens

    @property
    def is_remote_decode(self) -> bool:
        """Producer leg: its blocks are held for a reader, after one token."""
        return isinstance(self.request.kv, RemoteDecode)

    @property
    def max_tokens(self) -> int:
        return 1 if self.is_remote_decode else self.request.sampling.max_tokens

    def draw(self) -> Draw:
        """The choice of its next token."""
        sampling = self.request.sampling
        early = self.generated_tokens < sampling.min_tokens
        banned = self.stops if early else frozenset()
        return Draw(sampling, self.seed, self.generated_tokens, banned)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute in one step; everything before `start` is cached."""

    sequence: Sequence
    """For the loop's bookkeeping; the worker thread reads the other fields only."""
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    """The blocks of tokens 0 to `end`."""
    draw: Draw | None
    """None: more of the prompt follows, nothing is chosen."""

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token chosen after a chunk."""

    token: int
    logprobs: TokenLogprobs | None = None
