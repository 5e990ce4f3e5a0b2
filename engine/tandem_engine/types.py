"""The values that the engine's parts pass to each other.

    server ──Request──► engine ──Delta──► server
                          │ ▲
               blocks held│ │pulled (PullResult or KvLoadError)
                          ▼ │
                        transfer

Errors, all below `EngineError`:

    ConfigError       a setting that cannot be used
    RequestRejected   the request can never run here; nothing was started             (400)
    KvLoadError       remote KV could not be loaded; the policy says recompute or fail
      KvRefused       the producer refused: other engine id, model or layout; unknown request
      KvBroken        connection lost, wrong checksum, time limit
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from tandem_contract.kv_reference import LoadLeg, StoreLeg
from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams


class EngineError(Exception):
    """Root of this package's errors."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot be used; `main` shows it as a usage error."""


class RequestRejected(EngineError):
    """The request can never run here; the message tells the client why."""


class PromptContradictsKv(RequestRejected):
    """The remote KV that the request names is of another prompt."""


class KvLoadError(EngineError):
    """Remote KV could not be loaded."""


class KvRefused(KvLoadError):
    """The producer refused the read; a retry would be refused, too."""


class KvBroken(KvLoadError):
    """The transfer broke off, or its bytes were wrong."""


class LoadFailurePolicy(StrEnum):
    """vLLM's `kv_load_failure_policy`: compute the prompt here, or fail the request."""

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
    """Number of alternatives to report beside the sampled token; None: report no logprobs."""


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """A prefill for a remote decode (`do_remote_decode`): its blocks are held for a reader."""

    stream_id: str | None = None
    """Id under which a decode engine reads the KV while it is computed; None: afterwards."""


KvTransfer = RemoteDecode | TransferParams | StoreLeg | LoadLeg | None
"""A request's part in a hand-off."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run.

    `kv`: RemoteDecode when another engine reads its KV, TransferParams when its KV is pulled,
    StoreLeg when its KV is to be stored, LoadLeg when stored KV is to be loaded.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    kv: KvTransfer = None
    cache_salt: str = ""
    """The prompt shares KV only with prompts of the same salt, on every tier."""


class Tier(StrEnum):
    """Where KV lies beside the GPU: the label `tier` of metrics."""

    HOST = "host"
    STORAGE = "storage"

    @property
    def medium(self) -> str:
        """Its name in KV events, vLLM's."""
        return "CPU" if self is Tier.HOST else "STORAGE"


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: of the sampled token and of the top tokens."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The tokens that one step added to one sequence, and how the sequence ended, if it did."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta only; with `error`, the field of that name has the message."""
    stop_token: int | None = None
    """Token id that ended the sequence, when finish_reason is `stop`."""
    error: str | None = None
    timing: Timing | None = None
    """Set on the first delta with a token."""
    kv_transfer_params: dict[str, object] | None = None
    """Set on the last delta of a prefill for a remote decode."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV cache's layout, which both sides of a transfer must share; checked before a read."""

    model: str
    """Fingerprint of the weights, not a path: two copies of one model have the same."""
    dtype: str
    """The cache's data type: `float32`, `bfloat16`, …"""
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
    """A pull, or a load from host memory and storage, that brought KV."""

    tokens: int
    """Prompt tokens whose KV it brought."""
    bytes: int
    """Bytes of KV."""
    seconds: float
    """Seconds from the first byte of the request to the last block written. Of a stream, only the
    time in which blocks arrived: the rest is the prefill's."""
