"""What the engine's parts hand each other.

    server ──Request──► engine ──Delta──► server
                          │ ▲
               blocks held│ │pulled (PullResult or KvLoadError)
                          ▼ │
                        transfer

Errors, all below `EngineError`:

    RequestRejected   before admission; the client's fault, nothing was started     (400)
    KvLoadError       the remote KV could not be had; policy says recompute or fail
      KvRefused       the producer answered no: other engine id, model, layout; unknown request
      KvBroken        connection lost, wrong checksum, time limit
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams


class EngineError(Exception):
    """Root of this package's errors."""


class RequestRejected(EngineError):
    """The request can never run here; the message tells the client why."""


class KvLoadError(EngineError):
    """Remote KV could not be loaded."""


class KvRefused(KvLoadError):
    """The producer refused: asking again will not help."""


class KvBroken(KvLoadError):
    """The transfer broke off or brought wrong bytes."""


class LoadFailurePolicy(StrEnum):
    """vLLM's `kv_load_failure_policy`."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """vLLM's names and meanings; temperature 0 is greedy, top_k 0 is off."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token; None reports nothing."""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """Producer leg (`do_remote_decode`): keep the prompt's blocks for a reader when done."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run. `kv` says whether its KV leaves (RemoteDecode) or comes (params)."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    kv: RemoteDecode | TransferParams | None = None


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one position: the chosen token's, and the top alternatives'."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta. `error` carries `error`."""
    stop_token: int | None = None
    """The token id that ended it, when finish_reason is `stop`."""
    error: str | None = None
    timing: Timing | None = None
    """On the first delta with a token."""
    kv_transfer_params: dict[str, object] | None = None
    """On the last delta of a producer leg."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What both sides of a transfer must have equal, checked first."""

    model: str
    """Fingerprint of the weights' configuration, not a path: two copies of a model agree."""
    dtype: str
    """`float32`, `bfloat16`, …: of the cache."""
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pull that arrived whole."""

    tokens: int
    """Prompt tokens whose KV came over the wire."""
    bytes: int
    seconds: float
    """First request byte to last block written."""
