"""What the two pools of a set share: inherited where a DecodePool leaves it out, else compared.

Values are dicts as in the custom resources; paths are the CRD's.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from ..crd import DECODE_POOL, PREFILL_POOL
from .resolve import Defaults, resolve

FieldPath = tuple[str, ...]

AGREE: Final[tuple[FieldPath, ...]] = (
    ("model", "name"), ("model", "source"), ("model", "revision"), ("model", "servedNames"),
    ("model", "loraAdapters"),
    ("engine", "type"), ("engine", "version"), ("engine", "dtype"), ("engine", "kvCacheDtype"),
    ("engine", "blockSize"), ("engine", "maxModelLen"),
    ("transfer", "connector"), ("transfer", "connectors"), ("transfer", "storage"),
)  # fmt: skip
"""What both sides of a hand-off must have equal."""

_INHERITED: Final[tuple[FieldPath, ...]] = (
    *(path for path in AGREE if path != ("engine", "version")),
    ("transfer", "backends"), ("transfer", "bufferDevice"), ("transfer", "sideChannelPort"),
    ("transfer", "leaseDuration"), ("transfer", "rdma"), ("transfer", "requireRdma"),
    ("engine", "imagePullPolicy"),
)  # fmt: skip

_VERSION: Final = ("engine", "version")
_IMAGE: Final = ("engine", "image")
_ABSENT: Final = object()


@dataclass(frozen=True)
class Mismatch:
    """One field in which two pools of a set differ; None is left out."""

    path: FieldPath
    prefill: Any
    decode: Any
    stated_at: FieldPath
    """Where the DecodePool says its value: `engine.image` for a version read off its tag."""
    advice: str | None = None
    """What to do; None: leave it out to inherit it, or change it in both."""

    @property
    def field(self) -> str:
        return ".".join(self.path)


def inherit(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> dict[str, Any]:
    """The user spec of a DecodePool with what it takes over from its PrefillPool's."""
    merged = deepcopy(dict(decode))
    paths = list(_INHERITED)
    if _get(decode, _VERSION) is _ABSENT and _get(decode, _IMAGE) is _ABSENT:
        # An image of its own brings a version of its own, which is compared instead.
        paths.append(_VERSION)
    for path in (*paths, _IMAGE):
        value = _get(prefill, path)
        if value is not _ABSENT and _get(merged, path) is _ABSENT:
            _set(merged, path, deepcopy(value))
    return merged


def mismatches(
    prefill: Mapping[str, Any],
    decode: Mapping[str, Any],
    merged: Mapping[str, Any],
    defaults: Defaults,
) -> Iterator[Mismatch]:
    """Fields of `AGREE` in which what a DecodePool states contradicts its PrefillPool.

    `merged` is what `inherit` made of the two. What is only derived (served names from the
    model's name) follows the field it is derived from and is not named beside it.
    """
    wanted = resolve(PREFILL_POOL, "", prefill, defaults)
    stated = resolve(DECODE_POOL, "", merged, defaults)
    for path in AGREE:
        at = _IMAGE if path == _VERSION and _get(decode, path) is _ABSENT else path
        ours, theirs = _get(wanted, path), _get(stated, path)
        if ours != theirs and _get(decode, at) is not _ABSENT:
            yield Mismatch(path, _or_none(ours), _or_none(theirs), at)


def shared(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved spec that both sides of a hand-off must have equal."""
    values = {".".join(path): _get(spec, path) for path in AGREE}
    return {path: value for path, value in values.items() if value is not _ABSENT}


def _get(spec: Mapping[str, Any], path: FieldPath) -> Any:
    node: Any = spec
    for step in path:
        if not isinstance(node, Mapping) or step not in node:
            return _ABSENT
        node = node[step]
    return node


def _set(spec: dict[str, Any], path: FieldPath, value: Any) -> None:
    for step in path[:-1]:
        spec = spec.setdefault(step, {})
    spec[path[-1]] = value


def _or_none(value: Any) -> Any:
    return None if value is _ABSENT else value
