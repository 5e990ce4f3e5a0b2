"""The pools: custom resources as types, grouped into sets.

    sets = parse_pools(load_documents(path))              from files, all or nothing
    reading = read_set(prefill, decodes, defaults)        from the API server, each pool by itself

Everything of a file is checked here, once: the CRD's schema and rules on each object as it is
written, the fields that the pools of a set must agree on, and the rules again on each DecodePool
with what it inherits. What the API server holds it has checked already, but for what takes two
objects. Past this module a pool is valid and every field is chosen.

Errors: `errors.PoolsError`, all faults at once, each with file and line; `read_set` raises none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tandem_contract.documents import Document, DocumentError

from ..crd import DECODE_POOL, PREFILL_POOL
from ..errors import InvalidSet
from .agree import disagreements
from .inherit import Mismatch, inherit
from .members import (
    CompatHash,
    DecodePool,
    Pool,
    Pools,
    PoolSet,
    PrefillPool,
    Revision,
    Written,
    decode_pool,
    prefill_pool,
)
from .objects import PoolObject, valid_objects
from .resolve import DEFAULTS, Defaults
from .schema import Problem, nearest, problems
from .versions import refusals
from .words import contradiction

__all__ = [
    "CompatHash",
    "DecodePool",
    "Pool",
    "PoolSet",
    "Pools",
    "PrefillPool",
    "Revision",
    "parse_pools",
]


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
    made: dict[tuple[str, ...] | None, PrefillPool] = {
        key: prefill_pool(_written(one, one.spec), defaults) for key, one in prefills.items()
    }
    members: dict[tuple[str, ...] | None, list[DecodePool]] = {}
    faults: list[DocumentError] = []
    for one in objects:
        key = one.prefill_key
        decodes = members.setdefault(key or (one.kind, one.namespace, one.name), [])
        if one.kind == PREFILL_POOL:
            faults += _refused(one, refusals(made[key].spec))
            continue
        found = list(_misfits(one, prefills, defaults))
        faults += found
        if not found:
            user = inherit(prefills[key].spec, one.spec) if key else one.spec
            pool = decode_pool(_written(one, user), defaults)
            # What is inherited is said where it is written.
            above = list(refusals(made[key].spec)) if key else []
            faults += _refused(one, (p for p in refusals(pool.spec) if p not in above))
            decodes.append(pool)
    if faults:
        raise InvalidSet(faults)
    return tuple(PoolSet(made.get(key), tuple(decodes)) for key, decodes in members.items())


def _misfits(
    one: PoolObject,
    prefills: Mapping[tuple[str, str] | None, PoolObject],
    defaults: Defaults,
) -> Iterator[DocumentError]:
    """What keeps a DecodePool from its set: no such PrefillPool, or contradictions."""
    if (key := one.prefill_key) is None:
        return
    if key not in prefills:
        names = sorted(name for namespace, name in filter(None, prefills) if namespace == key[0])
        hint = nearest(key[1], names) or (f": there are {', '.join(names)}" if names else "")
        yield one.document.error(
            "spec.prefillRef.name", f"no PrefillPool {key[1]!r} in namespace {key[0]}{hint}"
        )
    else:
        prefill = prefills[key]
        spec = inherit(prefill.spec, one.spec)
        found = [
            one.document.error(
                ("spec", *m.stated_at), contradiction(m, str(one), str(prefill), _where(m, prefill))
            )
            for m in disagreements(prefill.spec, one.spec, spec, defaults)
        ]
        yield from found
        if not found:
            merged = {**one.data, "spec": spec}
            yield from (
                one.document.error(p.path, f"{p.message} (with what {prefill} gives)")
                for p in problems(DECODE_POOL, merged)
            )


def _refused(one: PoolObject, found: Iterable[Problem]) -> list[DocumentError]:
    return [one.document.error(problem.path, problem.message) for problem in found]


def _where(mismatch: Mismatch, prefill: PoolObject) -> str:
    return f" ({prefill.document.where(('spec', *mismatch.path))})"


def _written(one: PoolObject, spec: Mapping[str, Any]) -> Written:
    metadata = one.data["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    return Written(one.kind, one.name, one.namespace, spec, annotations, labels)
