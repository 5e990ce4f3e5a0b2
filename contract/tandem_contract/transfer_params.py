"""`kv_transfer_params` of sequential hand-offs, as vLLM's NIXL connectors write and read them.

    prefill request   sidecar → engine   PREFILL_LEG, constant: "keep the KV for a remote decode"
    prefill answer    engine → sidecar   TransferParams, from `read_transfer_params`
    decode request    sidecar → engine   the same object, byte for byte
    inside an engine                     TransferParams, from `transfer_params_from_object`

Hand-offs that run both legs at once are in `concurrent_params`.

Errors: `ParamsUnusable`: these parameters name no KV that can be read. The sidecar then has the
decode engine compute the prompt itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from .concurrent_params import STREAM, DecodeStream

T = TypeVar("T")

FIELD: Final = "kv_transfer_params"
"""Key of the object in request and response bodies."""

REQUEST_ID: Final = "request_id"
"""Key of a request's id in its body. A responses request can carry its id nowhere else."""

PROMPT_TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105 - no password
"""In the object of a chat request's decode leg: the tokenized prompt, used instead of messages."""

CLIENT_FORBIDDEN: Final = frozenset({FIELD, "ec_transfer_params", REQUEST_ID})
"""Body fields that a client may not set. The sidecar drops them on every path: a client could name
another request's KV, make an engine connect to a host of its choice, or stop the engine."""

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
"""The object of a prefill request, encoded as JSON."""


class ParamsUnusable(ValueError):
    """kv_transfer_params that name no KV to read; the message says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Where a decode engine finds a prompt's KV: the producer, its request and its KV blocks."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: tuple[tuple[int, ...], ...]
    """Block ids for each KV cache group."""
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    """Prompt tokens that the prefill engine found in its cache; vLLM reports it since 0.32."""
    tp_size: int | None = None
    """Tensor-parallel size of the producer; None: it did not say."""
    tandem_prompt_hash: str | None = None
    """`prefix.prompt_hash` of the prompt that the KV belongs to. The reference engine writes it and
    reads no KV without it; vLLM ignores it."""
    tandem_producer_proof: str | None = None
    """`producer_proof` of the engine id, host and port; None: the producer has no keys."""
    transfer_mode: str | None = None
    """`pull` or `push`; None: an engine older than vLLM 0.32 that does not say."""
    tandem_serves_streams: bool = False
    """Whether the producer's KV can be read while it is computed (`concurrent_params`)."""
    is_stream: bool = False
    """Never in an answer: these are a decode leg's own, which is sent before the prefill's answer.
    `remote_request_id` is the stream's id, and the blocks are not known."""

    def encode(self, **extra: object) -> dict[str, object]:
        """The object of a prefill answer; `extra` adds the producer's own fields."""
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
            "tp_size": self.tp_size or 1,
            "tandem_prompt_hash": self.tandem_prompt_hash,
            "tandem_producer_proof": self.tandem_producer_proof,
            "tandem_serves_streams": self.tandem_serves_streams,
            **extra,
        }


class _WireParams(msgspec.Struct):
    """The fields as a producer may write them: any may be absent or null; others are skipped."""

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
    tandem_producer_proof: str | None = None
    transfer_mode: str | None = None
    tandem_serves_streams: bool = False


_decoder: Final[msgspec.json.Decoder[_WireParams | None]] = msgspec.json.Decoder(_WireParams | None)


def read_transfer_params(raw: bytes) -> TransferParams:
    """The parameters in a producer's answer, `raw` being the JSON of the object.

    Raises ParamsUnusable when `raw` is null, is not an object, or lacks a field a reader needs.
    """
    try:
        wire = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    if wire is None:
        raise ParamsUnusable(f"{FIELD} is null")
    return _checked(wire)


def transfer_params_from_object(value: Mapping[str, Any]) -> TransferParams:
    """The parameters in a decoded request body. Raises ParamsUnusable as `read_transfer_params`."""
    if STREAM in value:
        return _stream_params(value[STREAM])
    try:
        wire = msgspec.convert(value, type=_WireParams)
    except msgspec.MsgspecError as err:
        raise ParamsUnusable(f"{FIELD}: {err}") from err
    return _checked(wire)


def _stream_params(value: object) -> TransferParams:
    try:
        stream = msgspec.convert(value, type=DecodeStream)
    except msgspec.MsgspecError as err:
        raise ParamsUnusable(f"{FIELD}.{STREAM}: {err}") from err
    source = stream.source
    return TransferParams(
        source.engine_id,
        stream.id,
        source.host,
        source.port,
        (),
        tandem_producer_proof=source.proof,
        is_stream=True,
    )


def _checked(wire: _WireParams) -> TransferParams:
    if not wire.do_remote_prefill:
        raise ParamsUnusable(f"{FIELD}.do_remote_prefill is not true")
    blocks = _groups(wire.remote_block_ids or ())
    # Groups without blocks: the producer has nothing that could be read.
    if wire.remote_block_ids and not any(blocks):
        raise ParamsUnusable(f"{FIELD}.remote_block_ids names no block")
    if wire.remote_port is not None and not 1 <= wire.remote_port <= 65535:
        raise ParamsUnusable(f"{FIELD}.remote_port {wire.remote_port} is not a port")
    return TransferParams(
        remote_engine_id=_required("remote_engine_id", wire.remote_engine_id),
        remote_request_id=_required("remote_request_id", wire.remote_request_id),
        remote_host=_required("remote_host", wire.remote_host),
        remote_port=_required("remote_port", wire.remote_port),
        remote_block_ids=_required("remote_block_ids", blocks),
        remote_num_tokens=wire.remote_num_tokens,
        remote_prefill_cached_tokens=wire.remote_prefill_cached_tokens,
        tp_size=wire.tp_size,
        tandem_prompt_hash=wire.tandem_prompt_hash,
        tandem_producer_proof=wire.tandem_producer_proof,
        transfer_mode=wire.transfer_mode,
        tandem_serves_streams=wire.tandem_serves_streams,
    )


def _required(name: str, value: T | None) -> T:
    # Empty counts as missing: an empty host or id could never be reached.
    if not value:
        raise ParamsUnusable(f"{FIELD}.{name} is missing")
    return value


def _groups(blocks: Sequence[Sequence[int] | int]) -> tuple[tuple[int, ...], ...]:
    """Block ids by KV cache group: older vLLM writes one flat list, newer a list per group."""
    flat = [block for block in blocks if isinstance(block, int)]
    # Flat: an engine with one KV cache group.
    if flat:
        return (tuple(flat),)
    return tuple(tuple(group) for group in blocks if not isinstance(group, int))
