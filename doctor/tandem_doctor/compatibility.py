"""Whether two engines may hand KV to each other: item by item, as a NIXL handshake compares them.

vLLM refuses a peer by one hash and says no more; here each item is named, with both values and the
fix (what goes into the hash: `nixl/metadata.py` of vLLM 0.32; block size, layout and TP it checks
at the handshake itself; seed 004's troubleshooting: roles, model, dtype, block size, length).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from .facts import Engine
from .findings import Finding, Severity

CHECK: Final = "compatible"

_OFFLOADING: Final = "OffloadingConnector"
_HIDDEN_STATES: Final = frozenset({"eagle", "eagle3", "mtp", "dflash", "dspark"})
"""`SpeculativeConfig.use_eagle` of vLLM 0.32."""


class _Speculation(msgspec.Struct):
    method: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """Something that both sides must have alike."""

    name: str
    value: Callable[[Engine], str | None]
    """None: not known of this engine."""
    fix: str
    hashed: bool = False
    """Whether it is in vLLM's hash: with equal hashes it is equal, however it was asked for."""


def _flag(name: str, default: str) -> Callable[[Engine], str | None]:
    return lambda e: e.declared.flags.get(name, default) if e.declared else None


def _connector(engine: Engine) -> str | None:
    """What hands over: a chain may offload besides on one side."""
    if engine.declared is None:
        return None
    names = sorted(set(engine.declared.connectors))
    return " and ".join([name for name in names if name != _OFFLOADING] or names)


def _speculation(engine: Engine) -> str | None:
    """Of methods that read the model's hidden states, whose own KV is handed over too."""
    text = _flag("speculative-config", "{}")(engine)
    if text is None:
        return None
    try:
        config = msgspec.json.decode(text, type=_Speculation)
    except msgspec.MsgspecError:
        return text
    return f"{config.method} of {config.model}" if config.method in _HIDDEN_STATES else "none"


def _said(name: str) -> Callable[[Engine], str | None]:
    def value(engine: Engine) -> str | None:
        metadata = engine.side_channel.metadata if engine.side_channel else {}
        return str(metadata[name]) if name in metadata else None

    return value


def _model(engine: Engine) -> str | None:
    """As it was asked for: what was loaded may lie at another place on each side."""
    asked = engine.declared.flags.get("model") if engine.declared else None
    return asked or engine.model


ITEMS: Final = (
    Item(
        "version",
        lambda e: e.version,
        "give both pools the same engine.version and image",
        hashed=True,
    ),
    Item("connector", _connector, "give both pools the same transfer.connector"),
    Item("model", _model, "give both pools the same model.name and source", hashed=True),
    Item("dtype", _flag("dtype", "auto"), "set engine.dtype on the PrefillPool only", hashed=True),
    Item(
        "kvCacheDtype",
        lambda e: e.cache.get("cache_dtype") or _flag("kv-cache-dtype", "auto")(e),
        "set engine.kvCacheDtype alike: an fp8 cache on one side cannot be read by the other",
        hashed=True,
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
        _said("attn_backend_name"),
        "pin it on both with --attention-backend: GPUs of different kinds choose differently",
    ),
    Item("cache layout", _said("kv_cache_layout"), "pin it on both: VLLM_KV_CACHE_LAYOUT"),
    Item(
        "hybrid allocator",
        _flag("disable-hybrid-kv-cache-manager", "false"),
        "give --disable-hybrid-kv-cache-manager to both engines or to neither",
        hashed=True,
    ),
    Item(
        "speculation",
        _speculation,
        "give --speculative-config (EAGLE, MTP) to both engines or to neither",
        hashed=True,
    ),
    Item(
        "LoRA adapters",
        lambda e: ", ".join(sorted(e.adapters)) or "none",
        "load every adapter on both sides before it is advertised",
    ),
)


def compare(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    """A finding for each item that differs; one that all agree; what is unknown is left out."""
    pair = f"{prefill.pod} → {decode.pod}"
    hashes = [e.side_channel.fingerprint if e.side_channel else None for e in (prefill, decode)]
    proven = None not in hashes and hashes[0] == hashes[1]
    differing = False
    for item in ITEMS:
        if item.hashed and proven:
            continue
        one, other = item.value(prefill), item.value(decode)
        if one is None or other is None or one == other:
            continue
        differing = True
        seen = f"{item.name}: prefill has {one}, decode has {other}"
        yield Finding(Severity.BROKEN, CHECK, pair, seen, item.fix)
    yield from _parallel(pair, prefill, decode)
    if None not in hashes and hashes[0] != hashes[1] and not differing:
        yield Finding(
            Severity.BROKEN,
            CHECK,
            pair,
            "the engines' own NIXL hashes differ in something that neither shows",
            "run both with the same image, flags and kind of GPU; VLLM_LOGGING_LEVEL=DEBUG prints "
            "what goes into the hash",
        )
    elif not differing:
        yield Finding(Severity.OK, CHECK, pair, "all that a hand-off compares is equal")


def _parallel(pair: str, prefill: Engine, decode: Engine) -> Iterator[Finding]:
    """TP may differ, but a wider prefill repeats KV heads where there are fewer than ranks."""
    sizes = [_flag("tensor-parallel-size", "1")(e) for e in (prefill, decode)]
    if None in sizes or not all(size and size.isdigit() for size in sizes):
        return
    if int(sizes[0] or 1) > int(sizes[1] or 1):
        yield Finding(
            Severity.WARNING,
            CHECK,
            pair,
            f"tensor parallel: prefill has {sizes[0]}, decode {sizes[1]}",
            "a prefill wider than its decode fails where the model has fewer KV heads than prefill "
            "ranks (other than MLA): make parallelism.tensor of decode at least as large",
        )
