"""`kv_transfer_params` as types (vLLM's NIXL pull, PROTOCOLS), every unknown field kept.

    prefill leg, sidecar → engine   PREFILL_LEG, constant
    prefill answer, engine → sidecar   KvTransferParams, from `parse_params`
    decode leg, sidecar → engine   the same object, verbatim: `params.raw`

Errors: `ParamsUnusable` says that a hand-off with this answer is impossible; decode without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

FIELD: Final = "kv_transfer_params"
"""Key of the object in request and response bodies."""

REQUEST_ID: Final = "request_id"
"""Key of a request's id in its body: responses have no other place for it."""

PROMPT_TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105 - no password
"""In the object of a chat's decode leg: the prompt ready tokenized, taken for the messages."""

CLIENT_FORBIDDEN: Final = frozenset({FIELD, "ec_transfer_params", REQUEST_ID})
"""Body fields a client may not send (PROTOCOLS): dropped on every path."""

PREFILL_LEG: Final = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What the sidecar puts in the prefill request, ready encoded."""


class ParamsUnusable(ValueError):
    """kv_transfer_params that name nothing to pull; the message says what lacks."""


@dataclass(frozen=True, slots=True)
class KvTransferParams:
    """What a decode engine needs to pull a prompt's KV; blocks are listed per KV cache group."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: tuple[tuple[int, ...], ...]
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    tp_size: int = 1
    tandem_prompt_hash: str | None = None
    """`prefix.prompt_hash` of the prompt the KV is of. Our engine writes and checks it; vLLM does
    neither, and passes over it."""
    raw: bytes = field(default=b"", repr=False, compare=False)
    """The object exactly as the producer wrote it."""

    def encode(self, **extra: object) -> dict[str, object]:
        """The object a producer answers with; `extra` adds fields of its own."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.remote_engine_id,
            "remote_request_id": self.remote_request_id,
            "remote_host": self.remote_host,
            "remote_port": self.remote_port,
            "remote_block_ids": [list(group) for group in self.remote_block_ids],
            "remote_num_tokens": self.remote_num_tokens,
            "remote_prefill_cached_tokens": self.remote_prefill_cached_tokens,
            "tp_size": self.tp_size,
            "tandem_prompt_hash": self.tandem_prompt_hash,
            **extra,
        }


class _Wire(msgspec.Struct):
    """The fields we look at; msgspec skips the others, `raw` keeps them."""

    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int] | int] | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    tp_size: int | None = None
    tandem_prompt_hash: str | None = None


_wire: Final = msgspec.json.Decoder(_Wire | None)
_REQUIRED: Final = (
    "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids",
)  # fmt: skip


def parse_params(raw: bytes) -> KvTransferParams:
    """The producer's answer as a type.

    Raises ParamsUnusable when `raw` is null, no object, or lacks what a reader needs.
    """
    try:
        wire = _wire.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    return _checked(wire, bytes(raw))


def params_from_object(value: Mapping[str, Any]) -> KvTransferParams:
    """The same from an already decoded JSON object, as an engine meets it in a request."""
    try:
        wire = msgspec.convert(value, type=_Wire)
    except msgspec.MsgspecError as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    return _checked(wire, b"")


def _checked(wire: _Wire | None, raw: bytes) -> KvTransferParams:
    if wire is None:
        raise ParamsUnusable(f"{FIELD} is null")
    if not wire.do_remote_prefill:
        raise ParamsUnusable(f"{FIELD}.do_remote_prefill is not true")
    for name in _REQUIRED:
        if getattr(wire, name) in (None, "", []):
            raise ParamsUnusable(f"{FIELD}.{name} is missing")
    groups = _groups(wire.remote_block_ids or [])
    if not any(groups):
        raise ParamsUnusable(f"{FIELD}.remote_block_ids names no block")
    port = int(wire.remote_port or 0)
    if not 1 <= port <= 65535:
        raise ParamsUnusable(f"{FIELD}.remote_port {port} is no port")
    return KvTransferParams(
        remote_engine_id=str(wire.remote_engine_id),
        remote_request_id=str(wire.remote_request_id),
        remote_host=str(wire.remote_host),
        remote_port=port,
        remote_block_ids=groups,
        remote_num_tokens=wire.remote_num_tokens,
        remote_prefill_cached_tokens=wire.remote_prefill_cached_tokens,
        tp_size=wire.tp_size or 1,
        tandem_prompt_hash=wire.tandem_prompt_hash,
        raw=raw,
    )


def _groups(blocks: Sequence[Sequence[int] | int]) -> tuple[tuple[int, ...], ...]:
    """Older vLLM lists blocks flat, newer per KV cache group."""
    flat = [b for b in blocks if isinstance(b, int)]
    if flat:
        return (tuple(flat),)
    return tuple(tuple(group) for group in blocks if not isinstance(group, int))
