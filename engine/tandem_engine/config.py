"""The engine's configuration: `EngineConfig`, and vLLM's `--kv-transfer-config` as a type.

Errors: `ConfigError`: one line with the wrong value and what it should be.
"""

import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tandem_contract import ports
from tandem_contract.connectors import LEASE_DURATION, TORCH_NIXL_SETTINGS
from tandem_contract.plan_keys import PlanKeys

from .tiers.settings import KvStorageConfig
from .transfer.wire import MAX_ID, MAX_SECONDS
from .types import ConfigError, LoadFailurePolicy

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

CONNECTOR: Final = "NixlConnector"
"""The `kv_connector` that this engine implements: hand-offs as with NixlConnector."""


class KvRole(StrEnum):
    """vLLM's `kv_role`: whether this engine takes the prefill or decode of hand-offs, or both. One
    that decodes also lets others read its KV when it is asked to, as vLLM's NixlConnector does."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"

    @property
    def consumes(self) -> bool:
        return self is not KvRole.PRODUCER


@dataclass(frozen=True, slots=True)
class KvTransferConfig:
    """The engine's role in hand-offs."""

    role: KvRole
    engine_id: str
    """Identifies this process: a restarted engine has another, so that old KV is refused."""
    lease: float = 30.0
    """Seconds that a finished prompt's blocks are held for a reader. Too low: prompts are computed
    again when decode engines queue; too high: blocks of failed readers stay in use."""
    policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    """The reaction to KV that cannot be loaded. The default differs from vLLM 0.32's `fail`: a
    recomputed prompt costs seconds, a failed request is lost."""
    side_channel_host: str = "127.0.0.1"
    """Address to listen on for readers, and the one that they are told to connect to."""
    side_channel_port: int = ports.SIDE_CHANNEL
    """0 takes a free port."""
    keys: PlanKeys = field(default_factory=lambda: PlanKeys(None), compare=False)
    """The set's transfer keys: with them, this engine moves KV with engines that have one, too."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of `Engine`; `main` takes the flags' defaults from here."""

    model: Path
    """Hugging Face directory: config.json and *.safetensors."""
    served_model_name: str | None = None
    """Model name in the API; None: the directory as given, as in vLLM."""
    dtype: DType = "auto"
    """Data type of weights, activations and KV; auto: what config.json says."""
    block_size: int = 16
    """Tokens per KV block; both engines of a hand-off need the same."""
    num_blocks: int | None = None
    """KV blocks; None: as many as `kv_bytes` holds."""
    kv_bytes: int | None = None
    """Size of the KV cache in bytes; None: 1 GiB on CPU, 80 % of the free memory on CUDA."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None: the model's own limit."""
    max_num_seqs: int = 64
    """Most sequences in one step. Higher: more throughput, and a longer time between tokens."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step. Lower: long prompts delay running decodes less, but take longer."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step that has other requests to serve; 0: as many as fit.
    Lower: a long prompt delays running decodes less in each step, but takes longer."""
    seed: int = 0
    """Seed of the random generator that requests without a seed draw from."""
    device: Device = "auto"
    """auto: CUDA when torch finds a GPU, else the CPU."""
    kv_storage: KvStorageConfig | None = None
    """Host memory and external storage for KV; None: it lies on the device only."""
    kv_transfer: KvTransferConfig | None = None
    """None: no hand-offs; a request that asks for one is computed here as a whole."""

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _at_least_one(name, getattr(self, name))
        for name in ("num_blocks", "kv_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.long_prefill_token_threshold < 0:
            threshold = self.long_prefill_token_threshold
            raise ConfigError(f"long_prefill_token_threshold is {threshold}: it must be at least 0")

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or str(self.model)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1")


class _Wire(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's KVTransferConfig; fields that have no meaning for this engine are ignored."""

    kv_connector: str
    kv_role: KvRole
    engine_id: str | None = None
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    kv_connector_extra_config: dict[str, Any] = {}
    kv_buffer_device: str | None = None
    kv_buffer_size: float | None = None
    kv_rank: int | None = None
    kv_parallel_size: int | None = None
    kv_ip: str | None = None
    kv_port: int | None = None
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False


def parse_kv_transfer_config(
    text: str, *, side_channel_host: str, side_channel_port: int
) -> KvTransferConfig:
    """Parse vLLM's JSON; without an engine id, a new one is made.

    Raises ConfigError when `text` is not such an object, has another connector or an unknown field,
    setting, role or policy, an engine id that is too long, or a lease that is not above 0 seconds
    and at most a day.
    """
    try:
        wire = msgspec.json.decode(text, type=_Wire)
    except (msgspec.MsgspecError, UnicodeEncodeError) as err:
        raise ConfigError(f"--kv-transfer-config: {err}") from err
    if wire.kv_connector != CONNECTOR:
        raise ConfigError(
            f"--kv-transfer-config: kv_connector {wire.kv_connector!r}: this engine has {CONNECTOR}"
        )
    extra = wire.kv_connector_extra_config
    if unknown := sorted(extra.keys() - {*TORCH_NIXL_SETTINGS}):
        raise ConfigError(
            f"--kv-transfer-config: kv_connector_extra_config has {unknown[0]!r}: this engine knows"
            f" {' and '.join(TORCH_NIXL_SETTINGS)} only"
        )
    lease = extra.get(LEASE_DURATION, 30.0)
    is_number = isinstance(lease, int | float) and not isinstance(lease, bool)
    if not is_number or not 0 < lease <= MAX_SECONDS:
        raise ConfigError(
            f"--kv-transfer-config: {LEASE_DURATION} {lease!r}: "
            "write seconds above 0, at most a day"
        )
    # Checked here, because a Hello with a longer id would be refused for each hand-off.
    if len(wire.engine_id or "") > MAX_ID:
        raise ConfigError(f"--kv-transfer-config: engine_id has more than {MAX_ID} characters")
    return KvTransferConfig(
        role=wire.kv_role,
        engine_id=wire.engine_id or uuid.uuid4().hex,
        lease=float(lease),
        policy=wire.kv_load_failure_policy,
        side_channel_host=side_channel_host,
        side_channel_port=side_channel_port,
    )
