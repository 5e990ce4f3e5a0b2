"""Fields that the pools of a set share: inherited ones, and ones both sides must agree on.

    inherit(prefill, decode)              -> the DecodePool's spec with the inherited fields
    is_inherited(path, prefill, decode)   -> whether a setting is the PrefillPool's alone
    disagreements(prefill, decode, …)     -> each contradiction, with field, both values and the fix
    compat_facts(spec)                    -> the values that the compat hash is computed from

Both sides must agree on the fields of `AGREE`, and on the engine flags and variables that change
the KV cache: vLLM's connectors check attention backend, cache layout, EAGLE or MTP drafting and
how the tensor sizes divide when two engines first meet.

Specs are dicts as in the custom resources; paths are the CRD's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL

from .lmcache import LMCACHE
from .resolve import Defaults, resolve
from .spec_parts import handoff_connector

FieldPath = tuple[str, ...]

AGREE: Final[tuple[FieldPath, ...]] = (
    ("model", "name"), ("model", "source"), ("model", "revision"), ("model", "servedNames"),
    ("model", "loraAdapters"),
    ("engine", "type"), ("engine", "version"), ("engine", "dtype"), ("engine", "kvCacheDtype"),
    ("engine", "blockSize"), ("engine", "maxModelLen"),
    ("transfer", "connector"), ("transfer", "connectors"), ("transfer", "storage"),
)  # fmt: skip
"""Fields in which both sides of a hand-off must be equal."""

_INHERITED: Final[tuple[FieldPath, ...]] = (
    *(path for path in AGREE if path != ("engine", "version")),
    ("transfer", "backends"), ("transfer", "extraConfig"), ("transfer", "bufferDevice"),
    ("transfer", "sideChannelPort"), ("transfer", "dataPorts"),
    ("transfer", "leaseDuration"), ("transfer", "rdma"), ("transfer", "requireRdma"),
    ("engine", "imagePullPolicy"), ("model", "cache"),
)  # fmt: skip

_VERSION: Final = ("engine", "version")
_IMAGE: Final = ("engine", "image")
_STORAGE: Final = ("transfer", "storage")
_OWN_OF_STORAGE: Final = frozenset({"image", "capacity", "maxAge"})
"""Fields of `transfer.storage` that change no KV."""
_ABSENT: Final = object()

_KV_FLAGS: Final = (
    "--attention-backend", "--block-size", "--dtype", "--hf-overrides", "--kv-cache-dtype",
    "--max-model-len", "--model-impl", "--quantization", "--revision", "--tokenizer",
)  # fmt: skip
"""Flags in engine.extraArgs that change the size or the content of a KV block."""
_KV_SWITCHES: Final = (
    "--disable-hybrid-kv-cache-manager",
    "--no-disable-hybrid-kv-cache-manager",
)
_SHORT_FLAGS: Final = {"-q": "--quantization"}
_SPECULATION: Final = "--speculative-config"
_DRAFT_METHODS_WITH_KV: Final = ("eagle", "mtp")
"""Speculative decoding methods whose draft layers have KV blocks of their own."""
_KV_VARIABLES: Final = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT")
_BACKEND_SETTINGS: Final = (
    "engine.extraArgs --attention-backend",
    "engine.env VLLM_ATTENTION_BACKEND",
)


@dataclass(frozen=True)
class Mismatch:
    """One field in which two pools of a set differ; a value of None means that it is left out."""

    path: FieldPath
    prefill: Any
    decode: Any
    stated_at: FieldPath
    """Where the DecodePool states its value: `engine.image` for a version read from its tag."""
    advice: str | None = None
    """The fix to suggest; None: leave the field out to inherit it, or change it in both pools."""

    @property
    def field(self) -> str:
        return ".".join(self.path)

    def message(self, decode: str, prefill: str, location: str = "") -> str:
        """Field, both values and the fix, for pools called `decode` and `prefill`.

        `location`: file and line of the PrefillPool's value, where it comes from a file.
        """
        advice = self.advice or f"leave it out of {decode} to inherit it, or change it in both"
        return (
            f"{self.field} is {_quoted(self.decode)} here and {_quoted(self.prefill)} in"
            f" {prefill}{location}: both sides of a hand-off must agree; {advice}"
        )


def inherit(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> dict[str, Any]:
    """The DecodePool's user spec with the fields that it inherits from its PrefillPool's."""
    merged = deepcopy(dict(decode))
    paths = list(_INHERITED)
    if _get(decode, _VERSION) is _ABSENT and _get(decode, _IMAGE) is _ABSENT:
        # A pool that sets its own image gets its version from the image's tag; an inherited
        # version could contradict it. `disagreements` compares the two versions instead.
        paths.append(_VERSION)
    for path in (*paths, _IMAGE):
        value = _get(prefill, path)
        if value is not _ABSENT and _get(merged, path) is _ABSENT:
            _set(merged, path, deepcopy(value))
    return merged


def is_inherited(
    path: Sequence[str | int], prefill: Mapping[str, Any], decode: Mapping[str, Any]
) -> bool:
    """Whether the value at `path` in `inherit(prefill, decode)` comes from the PrefillPool."""
    # An item of a list comes from where its list comes from.
    field = tuple(str(step) for step in takewhile(lambda step: isinstance(step, str), path))
    # A version may also come from an image's tag.
    paths = (_VERSION, _IMAGE) if field == _VERSION else (field,)
    return all(_get(decode, path) is _ABSENT for path in paths) and any(
        _get(prefill, path) is not _ABSENT for path in paths
    )


def disagreements(
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    merged: Mapping[str, Any],
    defaults: Defaults,
) -> Iterator[Mismatch]:
    """Everything in which a DecodePool contradicts its PrefillPool.

    `prefill` and `decode` are the specs as users wrote them, `merged` is `inherit` of the two.
    """
    yield from _field_mismatches(prefill, decode, merged, defaults)
    yield from _kv_setting_mismatches(prefill, merged)
    yield from _accelerator_mismatch(prefill, merged)
    yield from _tensor_size_mismatch(prefill, merged)


def compat_facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a resolved spec that both sides of a hand-off must have equal, by path."""
    values = {".".join(path): _shared(spec, path) for path in AGREE}
    fields = {path: value for path, value in values.items() if value is not _ABSENT}
    # Pods of earlier operators have no transfer keys, and move no KV with those that have.
    keys = {"transferKeys": True} if fields.get("engine.type") == "torch" else {}
    return {**fields, **_kv_settings(spec), **keys}


def replicated_heads_note(prefill: int, decode: int) -> str | None:
    """A limit on tensor sizes that needs the model's head count, which the operator does not know.

    None when the sizes cannot break it.
    """
    if prefill <= decode:
        return None
    return (
        f"prefill's tensor size {prefill} is above decode's {decode}: the model needs at least"
        f" {prefill} KV heads, or MLA"
    )


def takes_priorities(arguments: Sequence[str]) -> bool:
    """Whether vLLM with `engine.extraArgs` takes requests with a priority: else it refuses them."""
    return _flags(arguments).get("--scheduling-policy") == "priority"


def priority_note(prefill: Sequence[str], decode: Sequence[str]) -> str | None:
    """What becomes of requests with a priority, for `engine.extraArgs` of both; None: engines of
    both pools take them, or those of the DecodePool do not."""
    if takes_priorities(prefill) or not takes_priorities(decode):
        return None
    return (
        "prefill has no --scheduling-policy priority in engine.extraArgs: it refuses requests with"
        " a priority, and decode engines compute their prompts"
    )


def _field_mismatches(
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    merged: Mapping[str, Any],
    defaults: Defaults,
) -> Iterator[Mismatch]:
    """Fields of `AGREE` that the DecodePool itself states and that differ from its PrefillPool's.

    A value derived from another field (served names from the model's name) is not reported beside
    the field it is derived from.
    """
    prefill_spec = resolve(PREFILL_POOL, "", prefill, defaults)
    decode_spec = resolve(DECODE_POOL, "", merged, defaults)
    for path in AGREE:
        # The version may come from the tag of the DecodePool's own image.
        stated_at = _IMAGE if path == _VERSION and _get(decode, path) is _ABSENT else path
        ours, theirs = _shared(prefill_spec, path), _shared(decode_spec, path)
        if ours != theirs and _get(decode, stated_at) is not _ABSENT:
            yield Mismatch(path, _or_none(ours), _or_none(theirs), stated_at)


def _kv_setting_mismatches(
    prefill: Mapping[str, Any], decode: Mapping[str, Any]
) -> Iterator[Mismatch]:
    ours, theirs = _kv_settings(prefill), _kv_settings(decode)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            # Names are `engine.extraArgs --flag` or `engine.env NAME`: the field, then its entry.
            path = ("engine", name.removeprefix("engine."))
            stated_at = ("engine", path[1].split(" ")[0])
            yield Mismatch(
                path, ours.get(name), theirs.get(name), stated_at, "say the same in both"
            )


def _accelerator_mismatch(
    prefill: Mapping[str, Any], decode: Mapping[str, Any]
) -> Iterator[Mismatch]:
    ours = prefill.get("accelerator", {}).get("type")
    theirs = decode.get("accelerator", {}).get("type")
    pinned = _has_pinned_backend(prefill) and _has_pinned_backend(decode)
    if ours and theirs and ours != theirs and not pinned:
        path = ("accelerator", "type")
        yield Mismatch(
            path, ours, theirs, path,
            "vLLM picks an attention backend per accelerator and both sides need the same: pin it"
            " in both, like extraArgs [--attention-backend, FLASH_ATTN]",
        )  # fmt: skip


def _tensor_size_mismatch(
    prefill: Mapping[str, Any], decode: Mapping[str, Any]
) -> Iterator[Mismatch]:
    ours, theirs = _tensor_size(prefill), _tensor_size(decode)
    path = ("parallelism", "tensor")
    transfer = decode.get("transfer", {})
    chain = [str(link.get("connector")) for link in transfer.get("connectors", ())]
    names = chain or [str(transfer.get("connector"))]
    if ours != theirs and handoff_connector(names) in LMCACHE:
        yield Mismatch(
            path, ours, theirs, path,
            "LMCache finds only KV that was stored by as many workers: change either",
        )  # fmt: skip
    elif max(ours, theirs) % min(ours, theirs):
        yield Mismatch(
            path, ours, theirs, path, "one must be a multiple of the other: change either"
        )


def _tensor_size(spec: Mapping[str, Any]) -> int:
    # As `resolve` derives it: the tensor size is the device count unless parallelism is given.
    sizes = spec.get("parallelism")
    if sizes is None:
        return max(1, int(spec.get("accelerator", {}).get("count") or 1))
    return max(1, int(sizes.get("tensor", 1)))


def _kv_settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the KV cache in engine.extraArgs and engine.env, by place and name."""
    engine = spec.get("engine", {})
    flags = _flags(engine.get("extraArgs", ()))
    settings: dict[str, Any] = {
        f"engine.extraArgs {name}": flags[name]
        for name in (*_KV_FLAGS, *_KV_SWITCHES)
        if name in flags
    }
    if draft := _draft_method(flags):
        settings[f"engine.extraArgs {_SPECULATION}"] = draft
    variables = {variable.get("name"): variable.get("value") for variable in engine.get("env", ())}
    for name in _KV_VARIABLES:
        if name in variables:
            settings[f"engine.env {name}"] = variables[name]
    return settings


def _has_pinned_backend(spec: Mapping[str, Any]) -> bool:
    settings = _kv_settings(spec)
    return any(name in settings for name in _BACKEND_SETTINGS)


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """Flag → value, from `--flag value` or `--flag=value`; `true` for a flag without a value.

    As vLLM does: underscores count as dashes, and `--speculative-config.method m` sets a key of
    that flag's JSON.
    """
    flags: dict[str, str] = {}
    flag: str | None = None
    for argument in map(str, arguments):
        # A negative number is a value and not a flag.
        if argument.startswith("-") and not argument.lstrip("-")[:1].isdigit():
            name, has_value, value = argument.partition("=")
            flag = _SHORT_FLAGS.get(name, name.replace("_", "-"))
            flags[flag] = value if has_value else "true"
        elif flag is not None:
            flags[flag] = argument
            flag = None
    return flags


def _draft_method(flags: Mapping[str, str]) -> str | None:
    """The speculative decoding method, when its draft layers have KV blocks of their own."""
    method = flags.get(f"{_SPECULATION}.method")
    if method is None:
        try:
            config = json.loads(flags.get(_SPECULATION, "{}"))
        except ValueError:
            # Unreadable: compared as text, so that equal texts on both sides still agree.
            return flags[_SPECULATION]
        method = config.get("method") if isinstance(config, dict) else None
    name = str(method or "").lower()
    return name if any(part in name for part in _DRAFT_METHODS_WITH_KV) else None


def _get(spec: Mapping[str, Any], path: FieldPath) -> Any:
    node: Any = spec
    for step in path:
        if not isinstance(node, Mapping) or step not in node:
            return _ABSENT
        node = node[step]
    return node


def _shared(spec: Mapping[str, Any], path: FieldPath) -> Any:
    """The value of a field of `AGREE`, without the parts in which the two sides may differ."""
    value = _get(spec, path)
    if path == _STORAGE and isinstance(value, Mapping):
        return {name: part for name, part in value.items() if name not in _OWN_OF_STORAGE}
    return value


def _set(spec: dict[str, Any], path: FieldPath, value: Any) -> None:
    for step in path[:-1]:
        spec = spec.setdefault(step, {})
    spec[path[-1]] = value


def _or_none(value: Any) -> Any:
    return None if value is _ABSENT else value


def _quoted(value: Any) -> str:
    return "left out" if value is None else json.dumps(value, ensure_ascii=False)
