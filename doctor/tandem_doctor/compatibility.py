"""Whether two engines can hand KV to each other: compares them item by item, as NIXL does.

vLLM compares one hash and does not say what differs. Here each item is named, with both values and
the fix. Sources: `nixl/metadata.py` of vLLM 0.32 for what goes into the hash; its NIXL handshake
for block size, layout and TP, which it checks apart from the hash.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from tandem_contract import metrics

from .facts import Engine
from .findings import Finding, Severity
from .lmcache import chunk_size, hash_seed

CHECK: Final = "compatible"

_OFFLOADING: Final = "OffloadingConnector"
_HIDDEN_STATES: Final = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})
"""`SpeculativeConfig.use_eagle` of vLLM 0.32."""


class _Speculation(msgspec.Struct):
    method: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A property in which prefill and decode engine must agree."""

    name: str
    value: Callable[[Engine], str | None]
    """Reads the value; None if it is not known of the engine."""
    fix: str
    is_hashed: bool = False
    """Whether it is in vLLM's hash: with equal hashes it is equal, whatever the flags say."""


def _flag(name: str, default: str) -> Callable[[Engine], str | None]:
    return lambda e: e.command.flags.get(name, default) if e.command else None


def _connector(engine: Engine) -> str | None:
    """The connectors that hand over KV: one side of a pair may offload KV in addition."""
    if engine.command is None:
        return None
    names = sorted(set(engine.command.connectors))
    # An engine that only offloads has no other connector to compare.
    return " and ".join([name for name in names if name != _OFFLOADING] or names)


def _speculation(engine: Engine) -> str | None:
    """The draft model, for the methods that read hidden states: their KV is handed over, too."""
    text = _flag("speculative-config", "{}")(engine)
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=_Speculation)
    except msgspec.MsgspecError:
        # Not JSON: compare the flag as it is.
        return text
    return f"{config.method} of {config.model}" if config.method in _HIDDEN_STATES else "none"


def _side_channel_metadata(name: str) -> Callable[[Engine], str | None]:
    def value(engine: Engine) -> str | None:
        metadata = engine.side_channel.metadata if engine.side_channel else {}
        return str(metadata[name]) if name in metadata else None

    return value


def _model(engine: Engine) -> str | None:
    """The --model flag, if known: the paths of what was loaded may differ between the sides."""
    flag = engine.command.flags.get("model") if engine.command else None
    return flag or engine.model


ITEMS: Final = (
    Item(
        "version",
        lambda e: e.version,
        "give both pools the same engine.version and image",
        is_hashed=True,
    ),
    Item("connector", _connector, "give both pools the same transfer.connector"),
    Item("model", _model, "give both pools the same model.name and source", is_hashed=True),
    Item(
        "dtype", _flag("dtype", "auto"), "set engine.dtype on the PrefillPool only", is_hashed=True
    ),
    Item(
        "kvCacheDtype",
        lambda e: e.cache.get("cache_dtype") or _flag("kv-cache-dtype", "auto")(e),
        "set the same engine.kvCacheDtype on both: engines read caches of their own dtype only",
        is_hashed=True,
    ),
    Item(
        "blockSize",
        lambda e: e.cache.get("block_size") or _flag("block-size", "default")(e),
        "set engine.blockSize on the PrefillPool only",
    ),
    Item(
        "maxModelLen",
        lambda e: str(e.max_model_len) if e.max_model_len else None,
        "set engine.maxModelLen on the PrefillPool only",
    ),
    Item(
        "attention backend",
        _side_channel_metadata("attn_backend_name"),
        "set --attention-backend on both: different kinds of GPU have different defaults",
    ),
    Item(
        "cache layout",
        _side_channel_metadata("kv_cache_layout"),
        "set VLLM_KV_CACHE_LAYOUT on both",
    ),
    Item(
        "hybrid allocator",
        _flag("disable-hybrid-kv-cache-manager", "false"),
        "give --disable-hybrid-kv-cache-manager to both engines or to neither",
        is_hashed=True,
    ),
    Item(
        "speculation",
        _speculation,
        "give --speculative-config (EAGLE, MTP) to both engines or to neither",
        is_hashed=True,
    ),
    Item(
        "LoRA adapters",
        lambda e: ", ".join(sorted(e.adapters)) or "none",
        "load every adapter on both sides before clients use it",
    ),
    Item("hash seed", hash_seed, "leave PYTHONHASHSEED out of engine.env, or set it on both"),
    Item(
        "chunk size",
        chunk_size,
        "set lmcache.chunk_size in transfer.extraConfig of the PrefillPool only",
    ),
)


def compare(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    """A finding for each item that differs, or one that all are equal; skips unknown items."""
    pair = f"{prefill.pod} → {decode.pod}"
    hashes = [
        e.side_channel.compatibility_hash if e.side_channel else None for e in (prefill, decode)
    ]
    hashes_equal = None not in hashes and hashes[0] == hashes[1]
    differs = False
    for item in ITEMS:
        # The engines have compared it themselves, with resolved defaults that flags do not show.
        if item.is_hashed and hashes_equal:
            continue
        prefill_value, decode_value = item.value(prefill), item.value(decode)
        # Unknown on one side is no difference: the doctor reports only what it has seen on both.
        if prefill_value is None or decode_value is None or prefill_value == decode_value:
            continue
        differs = True
        detail = f"{item.name}: prefill has {prefill_value}, decode has {decode_value}"
        yield Finding(Severity.BROKEN, CHECK, pair, detail, item.fix)
    yield from _tensor_parallel(pair, prefill, decode)
    if None not in hashes and hashes[0] != hashes[1] and not differs:
        yield Finding(
            Severity.BROKEN,
            CHECK,
            pair,
            "the engines' NIXL compatibility hashes differ, but all items known here are equal",
            "run both with the same image, flags and kind of GPU; VLLM_LOGGING_LEVEL=DEBUG prints "
            "what goes into the hash",
        )
    elif not differs:
        yield Finding(Severity.OK, CHECK, pair, "everything that a hand-off compares is equal")


def _tensor_parallel(pair: str, prefill: Engine, decode: Engine) -> Iterator[Finding]:
    """A wider prefill is usual, but one with more ranks than KV heads holds copies of KV heads: it
    is named where transfers fail."""
    sizes = [_flag("tensor-parallel-size", "1")(e) for e in (prefill, decode)]
    # None: the command is unknown. A value that is not a number cannot be compared.
    if None in sizes or not all(size and size.isdigit() for size in sizes):
        return
    failures = (metrics.ENGINE_XFER_FAILED, metrics.ENGINE_HANDSHAKES_FAILED)
    has_failed = any(decode.counters.get(name, 0.0) for name in failures)
    if has_failed and int(sizes[0] or 1) > int(sizes[1] or 1):
        yield Finding(
            Severity.WARNING,
            CHECK,
            pair,
            f"tensor parallel: prefill has {sizes[0]}, decode {sizes[1]}, and transfers failed",
            "if the model has fewer KV heads than prefill ranks (except MLA), make "
            "parallelism.tensor of prefill at most the number of KV heads",
        )
