"""`kv_transfer_params` as types (vLLM's NIXL pull, PROTOCOLS).

    prefill leg, sidecar → engine   PREFILL_LEG, constant
    prefill answer, engine → sidecar   an Offer, from `read_offer`
    decode leg, sidecar → engine   the same object, verbatim
    decode leg, as the engine meets it   KvTransferParams, from `params_from_object`

Errors: `ParamsUnusable` says that a hand-off with this answer is impossible; decode without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


class Offer(msgspec.Struct):
    """The fields we look at, as the producer wrote them; msgspec skips the others."""

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
    transfer_mode: str | None = None
    """`pull` or `push`; engines before 0.32 do not say."""


_offer: Final[msgspec.json.Decoder[Offer | None]] = msgspec.json.Decoder(Offer | None)
_REQUIRED: Final = (
    "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids",
)  # fmt: skip


def read_offer(raw: bytes) -> Offer:
    """The producer's answer, which names all that a reader needs.

    Raises ParamsUnusable when `raw` is null, no object, or lacks something.
    """
    try:
        offer = _offer.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    if offer is None:
        raise ParamsUnusable(f"{FIELD} is null")
    _check(offer)
    return offer


def params_from_object(value: Mapping[str, Any]) -> KvTransferParams:
    """What an engine meets in a request, already decoded. Raises ParamsUnusable as `read_offer`."""
    try:
        offer = msgspec.convert(value, type=Offer)
    except msgspec.MsgspecError as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    _check(offer)
    return KvTransferParams(
        remote_engine_id=str(offer.remote_engine_id),
        remote_request_id=str(offer.remote_request_id),
        remote_host=str(offer.remote_host),
        remote_port=int(offer.remote_port or 0),
        remote_block_ids=_groups(offer.remote_block_ids or []),
        remote_num_tokens=offer.remote_num_tokens,
        remote_prefill_cached_tokens=offer.remote_prefill_cached_tokens,
        tp_size=offer.tp_size or 1,
        tandem_prompt_hash=offer.tandem_prompt_hash,
    )


def _check(offer: Offer) -> None:
    if not offer.do_remote_prefill:
        raise ParamsUnusable(f"{FIELD}.do_remote_prefill is not true")
    for name in _REQUIRED:
        if getattr(offer, name) in (None, "", []):
            raise ParamsUnusable(f"{FIELD}.{name} is missing")
    if not any(isinstance(blocks, int) or blocks for blocks in offer.remote_block_ids or []):
        raise ParamsUnusable(f"{FIELD}.remote_block_ids names no block")
    if not 1 <= (offer.remote_port or 0) <= 65535:
        raise ParamsUnusable(f"{FIELD}.remote_port {offer.remote_port} is no port")


def _groups(blocks: Sequence[Sequence[int] | int]) -> tuple[tuple[int, ...], ...]:
    """Older vLLM lists blocks flat, newer per KV cache group."""
    flat = [b for b in blocks if isinstance(b, int)]
    if flat:
        return (tuple(flat),)
    return tuple(tuple(group) for group in blocks if not isinstance(group, int))
