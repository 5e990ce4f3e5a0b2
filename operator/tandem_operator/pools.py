"""The pools: custom resources as types, grouped into sets.

    sets = parse_pools(load_documents(path))

Everything is checked here, once: the CRD's schema and rules on each object as it is written, the
fields that the pools of a set must agree on, and the rules again on each DecodePool with what it
inherits. Past this module a pool is valid and every field is chosen.

Errors: `errors.PoolsError`, all faults at once, each with file and line.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NewType

from tandem_contract.documents import Document, DocumentError
from tandem_contract.paths import Role

from .crd import DECODE_POOL, PREFILL_POOL
from .errors import InvalidSet
from .inherit import Mismatch, inherit, mismatches, shared
from .objects import PoolObject, valid_objects
from .resolve import DEFAULTS, Defaults, resolve
from .schema import nearest, problems
from .spec import DecodeSpec, PrefillSpec, typed

Revision = NewType("Revision", str)
CompatHash = NewType("CompatHash", str)

_NOT_IN_TEMPLATE: Final = frozenset(
    {"replicas", "scaling", "rollout", "paused", "routing", "prefillRef"}
)
_NOT_YET: Final = frozenset({"storage", "p2p-nccl"})
"""Connectors the CRD names and this release renders no command line for."""


@dataclass(frozen=True)
class _Pool:
    name: str
    namespace: str
    revision: Revision
    """Hash of what the user wrote about the pods; how many there are is no part of it."""
    compat: CompatHash
    """Hash of what both sides of a hand-off must share."""


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


@dataclass(frozen=True)
class PoolSet:
    """A PrefillPool and every DecodePool naming it; or one unified DecodePool alone."""

    prefill: PrefillPool | None
    decodes: tuple[DecodePool, ...]

    @property
    def name(self) -> str:
        """The PrefillPool's name, or that of the pool that stands alone."""
        return self.prefill.name if self.prefill else self.decodes[0].name

    @property
    def pools(self) -> tuple[PrefillPool | DecodePool, ...]:
        return (*((self.prefill,) if self.prefill else ()), *self.decodes)


Pools = tuple[PoolSet, ...]


def parse_pools(documents: Sequence[Document], defaults: Defaults = DEFAULTS) -> Pools:
    """The sets that `documents` describe, in the order of their first object.

    Raises InvalidPool when an object is no valid pool, InvalidSet when valid ones do not fit
    together. No document at all gives no set.
    """
    objects = valid_objects(documents)
    _require_unique(objects)
    return _sets(objects, defaults)


def _require_unique(objects: Sequence[PoolObject]) -> None:
    faults = []
    seen: dict[tuple[str, str, str], PoolObject] = {}
    for one in objects:
        first = seen.setdefault((one.kind, one.namespace, one.name), one)
        if first is not one:
            faults.append(
                one.document.error(
                    "metadata.name",
                    f"{one} is at {first.document.where('metadata.name')} already:"
                    " give one of them another name",
                )
            )
    if faults:
        raise InvalidSet(faults)


def _sets(objects: Sequence[PoolObject], defaults: Defaults) -> Pools:
    prefills = {one.prefill_key: one for one in objects if one.kind == PREFILL_POOL}
    members: dict[tuple[str, ...] | None, list[DecodePool]] = {}
    faults: list[DocumentError] = []
    for one in objects:
        key = one.prefill_key
        decodes = members.setdefault(key or (one.kind, one.namespace, one.name), [])
        if one.kind == PREFILL_POOL:
            faults += _not_rendered(one.document, one.spec)
            continue
        found = list(_misfits(one, prefills, defaults))
        faults += found
        if not found:
            decodes.append(_decode_pool(one, prefills[key] if key else None, defaults))
    if faults:
        raise InvalidSet(faults)
    made: dict[tuple[str, ...] | None, PrefillPool] = {
        key: _prefill_pool(one, defaults) for key, one in prefills.items()
    }
    return tuple(PoolSet(made.get(key), tuple(decodes)) for key, decodes in members.items())


def _misfits(
    one: PoolObject,
    prefills: Mapping[tuple[str, str] | None, PoolObject],
    defaults: Defaults,
) -> Iterator[DocumentError]:
    """What keeps a DecodePool from its set: no such PrefillPool, or contradictions."""
    if (key := one.prefill_key) is None:
        yield from _not_rendered(one.document, one.spec)
    elif key not in prefills:
        names = sorted(name for namespace, name in filter(None, prefills) if namespace == key[0])
        hint = nearest(key[1], names) or (f": there are {', '.join(names)}" if names else "")
        yield one.document.error(
            "spec.prefillRef.name", f"no PrefillPool {key[1]!r} in namespace {key[0]}{hint}"
        )
    else:
        prefill = prefills[key]
        spec = inherit(prefill.spec, one.spec)
        found = [
            one.document.error(("spec", *m.stated_at), _contradiction(m, one, prefill))
            for m in mismatches(prefill.spec, one.spec, spec, defaults)
        ]
        yield from found
        if not found:
            merged = {**one.data, "spec": spec}
            yield from (
                one.document.error(p.path, f"{p.message} (with what {prefill} gives)")
                for p in problems(DECODE_POOL, merged)
            )


def _contradiction(mismatch: Mismatch, one: PoolObject, prefill: PoolObject) -> str:
    where = prefill.document.where(("spec", *mismatch.path))
    return (
        f"{mismatch.field} is {_said(mismatch.decode)} here and {_said(mismatch.prefill)} in"
        f" {prefill} ({where}): both sides of a hand-off must agree; leave it out of {one} to"
        f" inherit it, or change it in both"
    )


def _said(value: Any) -> str:
    return "left out" if value is None else json.dumps(value, ensure_ascii=False)


def _not_rendered(document: Document, spec: Mapping[str, Any]) -> Iterator[DocumentError]:
    transfer = spec.get("transfer", {})
    chained = [link["connector"] for link in transfer.get("connectors", ())]
    for connector in (transfer.get("connector"), *chained):
        if connector in _NOT_YET:
            yield document.error(
                "spec.transfer.connector", f"{connector} is not available in this release: use nixl"
            )


def _prefill_pool(one: PoolObject, defaults: Defaults) -> PrefillPool:
    spec = resolve(PREFILL_POOL, one.name, one.spec, defaults)
    return PrefillPool(
        one.name, one.namespace, _revision(one.kind, one.spec, {}), _compat(spec),
        typed(spec, PrefillSpec),
    )  # fmt: skip


def _decode_pool(one: PoolObject, prefill: PoolObject | None, defaults: Defaults) -> DecodePool:
    user = inherit(prefill.spec, one.spec) if prefill else one.spec
    spec = resolve(DECODE_POOL, one.name, user, defaults)
    routing = spec["routing"]
    read_by_pods = {"endpoint": routing["endpoint"], "epp": routing["epp"]["enabled"]}
    return DecodePool(
        one.name, one.namespace, _revision(one.kind, user, read_by_pods), _compat(spec),
        typed(spec, DecodeSpec),
    )  # fmt: skip


def _revision(kind: str, user: Mapping[str, Any], more: Mapping[str, Any]) -> Revision:
    spec = {key: value for key, value in user.items() if key not in _NOT_IN_TEMPLATE}
    return Revision(_short_hash({"kind": kind, "spec": spec, **more}))


def _compat(spec: Mapping[str, Any]) -> CompatHash:
    return CompatHash(_short_hash(shared(spec)))


def _short_hash(value: Mapping[str, Any]) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]
