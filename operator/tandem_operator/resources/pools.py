"""The pools of a set as types. A pool here is valid by itself, with everything it inherits, and
every field is chosen.

    prefill_pool(manifest, defaults), decode_pool(manifest, defaults)      custom resource → pool

`pool_files` reads pools from YAML files, `planning.validation` from the API server.

A pool's revision is a hash of what its user wrote about the pods. It must not change when Tandem
is upgraded, because a new revision restarts the pods: values that equal the CRD's defaults are
left out of it, so that a default added by a later CRD is no change. Empty mappings and lists, which
state nothing, are left out as well, and so are fields that change in running pods. Earlier recipes
kept them; their hashes, `former_revisions`, still name the revisions of pools that were created
with them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NewType, TypeVar

import msgspec

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.durations import Seconds, parse_duration
from tandem_contract.paths import Role

from ..crd import load_schema
from .compatibility import compat_facts
from .resolve import Defaults, resolve
from .spec import DecodeSpec, PrefillSpec

Revision = NewType("Revision", str)
CompatHash = NewType("CompatHash", str)
T = TypeVar("T")

_NOT_IN_TEMPLATE: Final = frozenset(
    {"replicas", "scaling", "rollout", "paused", "routing", "prefillRef"}
)
"""Fields of the spec that change no pod, and so no revision."""
_LIVE: Final = frozenset({"sidecar"})
"""Fields of the spec that change in running pods; earlier recipes had them in the revision."""
_CHANGES_NO_POD: Final = frozenset({"prePull", "capacity", "maxAge"})
"""Fields, at any depth, that are in no revision: `prePull` acts when a revision is new, the bounds
of `transfer.storage` change in running pods."""
_MEANT_WHEN_EMPTY: Final = frozenset({"tiny"})
"""Fields whose presence is a choice: `source.tiny: {}` is another model than no source."""
_ABSENT: Final = object()


@dataclass(frozen=True)
class _Pool:
    name: str
    namespace: str
    revision: Revision
    """Hash of what the user wrote about the pods; the number of pods is not part of it."""
    former_revisions: tuple[Revision, ...]
    """The revision by each earlier recipe, the newest first; equal to `revision` for most specs."""
    compat: CompatHash
    """Hash of what both sides of a hand-off must share."""
    kueue_labels: Mapping[str, str]
    """Kueue's labels of the pool's object, which its pods get as well."""


@dataclass(frozen=True)
class PrefillPool(_Pool):
    """Pods that prefill."""

    spec: PrefillSpec

    @property
    def role(self) -> Role:
        return Role.PREFILL


@dataclass(frozen=True)
class DecodePool(_Pool):
    """Pods that decode, or do both."""

    spec: DecodeSpec

    @property
    def role(self) -> Role:
        return self.spec.role


Pool = PrefillPool | DecodePool


@dataclass(frozen=True)
class PoolSet:
    """A PrefillPool and every DecodePool that names it; or one unified DecodePool alone."""

    prefill: PrefillPool | None
    decodes: tuple[DecodePool, ...]

    @property
    def name(self) -> str:
        """The PrefillPool's name, or that of the pool that stands alone."""
        return self.prefill.name if self.prefill else self.decodes[0].name

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*((self.prefill,) if self.prefill else ()), *self.decodes)


Pools = tuple[PoolSet, ...]


@dataclass(frozen=True)
class PoolManifest:
    """The parts of a custom resource that a pool is made from."""

    kind: str
    name: str
    namespace: str
    spec: Mapping[str, Any]
    """The user's spec with the schema's defaults and the inherited fields."""
    annotations: Mapping[str, str]
    labels: Mapping[str, str]


def prefill_pool(manifest: PoolManifest, defaults: Defaults) -> PrefillPool:
    """The typed PrefillPool.

    Raises msgspec.ValidationError, KeyError, TypeError or ValueError for a spec that breaks the
    schema.
    """
    spec = resolve(PREFILL_POOL, manifest.name, manifest.spec, defaults)
    return PrefillPool(
        manifest.name, manifest.namespace, *_revisions(manifest, {}), _compat_hash(spec),
        _kueue_labels(manifest), _typed(spec, PrefillSpec),
    )  # fmt: skip


def decode_pool(manifest: PoolManifest, defaults: Defaults) -> DecodePool:
    """The typed DecodePool; raises as `prefill_pool` does."""
    spec = resolve(DECODE_POOL, manifest.name, manifest.spec, defaults)
    routing = spec["routing"]
    # `routing` is not hashed, except for the fields that pods are rendered from.
    in_pods = {"endpoint": routing["endpoint"], "epp": routing["epp"]["enabled"]}
    if tls := routing.get("tls"):
        in_pods["tls"] = tls
    if paths := routing.get("apiPaths"):
        in_pods["apiPaths"] = paths
    # A flag of the engines of decode pods.
    if spec["role"] == Role.DECODE and (tokens := routing.get("maxPrefillOnDecode")):
        in_pods["maxPrefillOnDecode"] = tokens
    if limit := routing.get("maxRequestBytes"):
        in_pods["maxRequestBytes"] = limit
    return DecodePool(
        manifest.name, manifest.namespace, *_revisions(manifest, in_pods), _compat_hash(spec),
        _kueue_labels(manifest), _typed(spec, DecodeSpec),
    )  # fmt: skip


def with_revision(pool: Pool, revision: str) -> Pool:
    """The same pool under another revision than that of its own hash."""
    return replace(pool, revision=Revision(revision))


def short_hash(value: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the value's canonical JSON."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def _typed(spec: dict[str, Any], kind: type[T]) -> T:
    """A resolved and valid spec as `kind`. Raises msgspec.ValidationError for another shape."""
    return msgspec.convert(spec, type=kind, dec_hook=_decode)


def _decode(kind: type, value: Any) -> Any:
    if kind is Seconds:
        return Seconds(parse_duration(value))
    raise NotImplementedError(kind)


def _revisions(
    manifest: PoolManifest, in_pods: Mapping[str, Any]
) -> tuple[Revision, tuple[Revision, ...]]:
    """The revision, and those by the earlier recipes."""
    # A unified pool may have a prefillRef, and its pods hand off only with one. Decode pools
    # always have one.
    splits = manifest.spec.get("role") == Role.UNIFIED and "prefillRef" in manifest.spec
    handoff = {"handoff": True} if splits else {}
    with_handoff = {**in_pods, **handoff}
    return (
        _revision(manifest, with_handoff, keep_empty=False, left_out=_NOT_IN_TEMPLATE | _LIVE),
        (
            _revision(manifest, with_handoff, keep_empty=False, left_out=_NOT_IN_TEMPLATE),
            _revision(manifest, in_pods, keep_empty=True, left_out=_NOT_IN_TEMPLATE),
        ),
    )


def _revision(
    manifest: PoolManifest,
    in_pods: Mapping[str, Any],
    *,
    keep_empty: bool,
    left_out: frozenset[str],
) -> Revision:
    # Hash the user's spec, not the resolved one: resolved defaults change between releases.
    spec_schema = load_schema(manifest.kind)["properties"]["spec"]
    user = _stated(spec_schema, manifest.spec, keep_empty=keep_empty)
    spec = {key: value for key, value in user.items() if key not in left_out}
    # Optional parts join the hash only when they are given, so that pools without them keep theirs.
    restarted = manifest.annotations.get(labels.RESTARTED_AT)
    restart = {"restartedAt": restarted} if restarted else {}
    queue = {"queueing": kueue} if (kueue := _kueue_labels(manifest)) else {}
    return Revision(
        short_hash({"kind": manifest.kind, "spec": spec, **in_pods, **restart, **queue})
    )


def _stated(schema: Mapping[str, Any], value: Any, *, keep_empty: bool) -> Any:
    """`value` without the fields that equal the schema's default, or are empty."""
    if isinstance(value, list):
        items = schema.get("items", {})
        return [_stated(items, item, keep_empty=keep_empty) for item in value]
    # What has no schema, such as a Pod's `emptyDir: {}`, is not ours to judge.
    if not isinstance(value, Mapping) or "properties" not in schema:
        return value
    stated = {}
    for name, item in value.items():
        field = schema["properties"].get(name, {})
        # Inner fields first: a mapping that holds only defaults then equals its own default.
        item = _stated(field, item, keep_empty=keep_empty)
        is_left_out = not keep_empty and item in ({}, []) and name not in _MEANT_WHEN_EMPTY
        if is_left_out or name in _CHANGES_NO_POD:
            continue
        default = field.get("default", _ABSENT)
        if default is _ABSENT or item != _stated(field, default, keep_empty=keep_empty):
            stated[name] = item
    return stated


def _kueue_labels(manifest: PoolManifest) -> dict[str, str]:
    return {k: v for k, v in manifest.labels.items() if k.startswith(labels.KUEUE_PREFIX)}


def _compat_hash(spec: Mapping[str, Any]) -> CompatHash:
    return CompatHash(short_hash(compat_facts(spec)))
