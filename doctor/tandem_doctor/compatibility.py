"""Whether two engines may hand KV to each other: item by item, as a NIXL handshake compares them.

vLLM refuses a peer by one hash and says no more; here each item is named, with both values and the
fix (what goes into the hash: `nixl/metadata.py` of vLLM 0.32; block size, layout and TP it checks
at the handshake itself; seed 004's troubleshooting: roles, model, dtype, block size, length).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from .facts import Engine
from .findings import Finding, Severity

CHECK: Final = "compatible"


@dataclass(frozen=True, slots=True)
class Item:
    """Something that both sides must have alike."""

    name: str
    value: Callable[[Engine], str | None]
    """None: not known of this engine."""
    fix: str


def _flag(name: str, default: str) -> Callable[[Engine], str | None]:
    return lambda e: e.declared.flags.get(name, default) if e.declared else None


def _transfer(name: str) -> Callable[[Engine], str | None]:
    return lambda e: str(e.declared.transfer.get(name)) if e.declared else None


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
    Item("version", lambda e: e.version, "give both pools the same engine.version and image"),
    Item("connector", _transfer("kv_connector"), "give both pools the same transfer.connector"),
    Item("model", _model, "give both pools the same model.name and source"),
    Item("dtype", _flag("dtype", "auto"), "set engine.dtype on the PrefillPool only"),
    Item(
        "kvCacheDtype",
        lambda e: e.cache.get("cache_dtype") or _flag("kv-cache-dtype", "auto")(e),
        "set engine.kvCacheDtype alike: an fp8 cache on one side cannot be read by the other",
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
    ),
    Item(
        "speculation",
        _flag("speculative-config", "none"),
        "give --speculative-config (EAGLE, MTP) to both engines or to neither",
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
    differing = False
    for item in ITEMS:
        one, other = item.value(prefill), item.value(decode)
        if one is None or other is None or one == other:
            continue
        differing = True
        seen = f"{item.name}: prefill has {one}, decode has {other}"
        yield Finding(Severity.BROKEN, CHECK, pair, seen, item.fix)
    yield from _parallel(pair, prefill, decode)
    hashes = [e.side_channel.fingerprint if e.side_channel else None for e in (prefill, decode)]
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
