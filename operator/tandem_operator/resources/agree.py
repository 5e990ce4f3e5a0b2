"""What the two sides of a hand-off must have equal: the fields of the custom resources, and what
engine flags and variables say behind their back.

    compat_facts(spec)            -> what the compat hash is made of
    disagreements(prefill, decode, …) -> each contradiction, with field, both values and the fix

Beyond the fields of `inherit.AGREE`, from what vLLM's connectors check at a handshake: attention
backend, cache layout, EAGLE or MTP drafting, and how the tensor sizes divide.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .inherit import Mismatch, mismatches, shared
from .resolve import Defaults

_FLAGS: Final = (
    "--attention-backend", "--block-size", "--dtype", "--hf-overrides", "--kv-cache-dtype",
    "--max-model-len", "--model-impl", "--quantization", "--revision", "--tokenizer",
)  # fmt: skip
"""Of engine.extraArgs: each changes what a KV block is or means."""
_SWITCHES: Final = ("--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager")
_SHORT: Final = {"-q": "--quantization"}
_SPECULATION: Final = "--speculative-config"
_DRAFTS_IN_THE_MODEL: Final = ("eagle", "mtp")
"""Methods whose draft layers hold KV blocks of their own."""
_VARIABLES: Final = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT")
_BACKEND: Final = "engine.extraArgs --attention-backend"


def compat_facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved spec that both sides of a hand-off must have equal."""
    return {**shared(spec), **_behind(spec)}


def disagreements(
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    merged: Mapping[str, Any],
    defaults: Defaults,
) -> Iterator[Mismatch]:
    """Everything in which a DecodePool contradicts its PrefillPool.

    `prefill` and `decode` are what users wrote, `merged` is what `inherit` made of the two.
    """
    yield from mismatches(prefill, decode, merged, defaults)
    ours, theirs = _behind(prefill), _behind(merged)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            path = ("engine", name.removeprefix("engine."))
            at = ("engine", path[1].split(" ")[0])
            yield Mismatch(path, ours.get(name), theirs.get(name), at, "say the same in both")
    yield from _mixed_accelerators(prefill, merged, pinned=_pinned(ours) and _pinned(theirs))
    yield from _tensor_sizes(prefill, merged)


def replicated_heads_note(prefill: int, decode: int) -> str | None:
    """What the operator cannot check, not knowing the model: None when there is nothing to say."""
    if prefill <= decode:
        return None
    return (
        f"prefill's tensor size {prefill} is above decode's {decode}: the model needs at least"
        f" {prefill} KV heads, or MLA"
    )


def _behind(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What extraArgs and env say of the KV cache, by where it is said."""
    engine = spec.get("engine", {})
    flags = _flags(engine.get("extraArgs", ()))
    said: dict[str, Any] = {
        f"engine.extraArgs {name}": flags[name] for name in (*_FLAGS, *_SWITCHES) if name in flags
    }
    if draft := _draft(flags):
        said[f"engine.extraArgs {_SPECULATION}"] = draft
    variables = {one.get("name"): one.get("value") for one in engine.get("env", ())}
    for name in _VARIABLES:
        if name in variables:
            said[f"engine.env {name}"] = variables[name]
    return said


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Flag → value, `--flag value` or `--flag=value`; of a flag without one, `true`.

    vLLM takes underscores for dashes, and `--speculative-config.method m` for a key of its JSON.
    """
    found: dict[str, str] = {}
    flag: str | None = None
    for word in map(str, arguments):
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            head, given, value = word.partition("=")
            flag = _SHORT.get(head, head.replace("_", "-"))
            found[flag] = value if given else "true"
        elif flag is not None:
            found[flag] = word
            flag = None
    return found


def _draft(flags: Mapping[str, str]) -> str | None:
    """The method of drafting, where it has KV blocks of its own."""
    method = flags.get(f"{_SPECULATION}.method")
    if method is None:
        try:
            config = json.loads(flags.get(_SPECULATION, "{}"))
        except ValueError:
            return flags[_SPECULATION]
        method = config.get("method") if isinstance(config, dict) else None
    named = str(method or "").lower()
    return named if any(part in named for part in _DRAFTS_IN_THE_MODEL) else None


def _pinned(said: Mapping[str, Any]) -> bool:
    return _BACKEND in said or "engine.env VLLM_ATTENTION_BACKEND" in said


def _mixed_accelerators(
    prefill: Mapping[str, Any], decode: Mapping[str, Any], *, pinned: bool
) -> Iterator[Mismatch]:
    ours = prefill.get("accelerator", {}).get("type")
    theirs = decode.get("accelerator", {}).get("type")
    if ours and theirs and ours != theirs and not pinned:
        path = ("accelerator", "type")
        yield Mismatch(
            path, ours, theirs, path,
            "vLLM picks an attention backend per accelerator and both sides need the same: pin it"
            " in both, like extraArgs [--attention-backend, FLASH_ATTN]",
        )  # fmt: skip


def _tensor_sizes(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> Iterator[Mismatch]:
    ours, theirs = _tensor(prefill), _tensor(decode)
    if max(ours, theirs) % min(ours, theirs):
        path = ("parallelism", "tensor")
        yield Mismatch(
            path, ours, theirs, path, "one must be a multiple of the other: change either"
        )


def _tensor(spec: Mapping[str, Any]) -> int:
    sizes = spec.get("parallelism")
    if sizes is None:
        return max(1, int(spec.get("accelerator", {}).get("count") or 1))
    return max(1, int(sizes.get("tensor", 1)))
