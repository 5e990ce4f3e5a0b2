"""Pools from YAML files, all or nothing.

    sets = parse_pools(load_documents(path))

Every object is checked here, once: its structure and the CRD's rules as it is written, the fields
on which the pools of a set must agree, and the rules again on each DecodePool with what it
inherits. (`planning.validation` reads pools from the API server, which has checked each object by
itself.) Past this module a pool is valid and every field is chosen.

Errors: `errors.PoolsError` with all faults at once, each with file and line.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.documents import Document, DocumentError

from ..crd import KINDS
from ..errors import InvalidPool, InvalidSet
from .compatibility import Mismatch, disagreements, inherit
from .pools import (
    DecodePool,
    PoolManifest,
    Pools,
    PoolSet,
    PrefillPool,
    decode_pool,
    prefill_pool,
)
from .resolve import DEFAULTS, Defaults
from .schema import Path_, Problem, defaulted, nearest, problems
from .vllm_versions import unsupported_settings

_DEFAULT_NAMESPACE: Final = "default"

PrefillKey = tuple[str, str]
"""Namespace and name of a PrefillPool."""


@dataclass(frozen=True)
class PoolDocument:
    """One valid custom resource and where it was written."""

    document: Document
    data: Mapping[str, Any] = field(repr=False)
    """The object with the schema's defaults."""

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def name(self) -> str:
        return str(self.data["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.data["metadata"].get("namespace", _DEFAULT_NAMESPACE))

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.data["spec"]
        return spec

    @property
    def prefill_key(self) -> PrefillKey | None:
        """The PrefillPool of the object's set; None for a pool that stands alone."""
        if self.kind == PREFILL_POOL:
            return self.namespace, self.name
        ref = self.spec.get("prefillRef")
        return (self.namespace, ref["name"]) if ref else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def parse_pools(documents: Sequence[Document], defaults: Defaults = DEFAULTS) -> Pools:
    """The sets that `documents` describe, in the order of their first object.

    Raises InvalidPool when an object is no valid pool, InvalidSet when valid pools do not fit
    together. No document at all gives no set.
    """
    objects = _valid_objects(documents)
    _require_unique(objects)
    return _group_into_sets(objects, defaults)


def _valid_objects(documents: Sequence[Document]) -> list[PoolDocument]:
    """Every document as an object. Raises InvalidPool with all faults of all documents."""
    faults: list[DocumentError] = []
    objects = []
    for document in documents:
        errors = list(_type_errors(document)) or list(_json_errors(document, document.data, ()))
        if not errors:
            data = defaulted(document.data["kind"], document.data)
            errors = [document.error(p.path, p.message) for p in problems(data["kind"], data)]
            # Kept even when faulty: all documents are checked before any error is raised.
            objects.append(PoolDocument(document, data))
        faults += errors
    if faults:
        # Faulty objects are not compared with each other: that would only repeat their faults.
        raise InvalidPool(faults)
    return objects


def _type_errors(document: Document) -> Iterator[DocumentError]:
    """Why a document is not a PrefillPool or DecodePool at all."""
    data = document.data
    if not isinstance(data, dict):
        yield document.error("", f"expected a mapping with apiVersion, kind, metadata and spec of a"
                                 f" {' or '.join(KINDS)}")  # fmt: skip
        return
    for name, known in (("apiVersion", (labels.API_VERSION,)), ("kind", KINDS)):
        value = data.get(name)
        if value is None:
            yield document.error(name, f"is required: {' or '.join(known)}")
        elif value not in known:
            yield document.error(name, f"{value!r} is not {' or '.join(known)}"
                                       f"{nearest(value, known)}")  # fmt: skip


def _json_errors(document: Document, value: Any, path: Path_) -> Iterator[DocumentError]:
    """YAML values that an API object cannot have: dates, sets, keys that are no strings."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield document.error(path, f"key {key!r} is not a string: put it in quotes")
            else:
                yield from _json_errors(document, item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _json_errors(document, item, (*path, i))
    elif value is not None and not isinstance(value, str | int | float):
        yield document.error(path, f"{value} is not a JSON value: put it in quotes")
    elif isinstance(value, float) and not abs(value) < float("inf"):
        yield document.error(path, f"{value} is not a JSON number")


def _require_unique(objects: Sequence[PoolDocument]) -> None:
    faults = []
    by_name: dict[tuple[str, str, str], PoolDocument] = {}
    for pool in objects:
        first = by_name.setdefault((pool.kind, pool.namespace, pool.name), pool)
        if first is not pool:
            faults.append(
                pool.document.error(
                    "metadata.name",
                    f"{pool} is at {first.document.where('metadata.name')} already:"
                    " give one of them another name",
                )
            )
    if faults:
        raise InvalidSet(faults)


def _group_into_sets(objects: Sequence[PoolDocument], defaults: Defaults) -> Pools:
    prefills = {pool.prefill_key: pool for pool in objects if pool.kind == PREFILL_POOL}
    typed: dict[tuple[str, ...] | None, PrefillPool] = {
        key: prefill_pool(_manifest(pool, pool.spec), defaults) for key, pool in prefills.items()
    }
    members: dict[tuple[str, ...] | None, list[DecodePool]] = {}
    faults: list[DocumentError] = []
    for pool in objects:
        # A pool without PrefillPool is a set of its own, under a key that no PrefillPool can have.
        key = pool.prefill_key
        decodes = members.setdefault(key or (pool.kind, pool.namespace, pool.name), [])
        if pool.kind == PREFILL_POOL:
            faults += _errors(pool, unsupported_settings(typed[key].spec))
            continue
        contradictions = list(_set_errors(pool, prefills, defaults))
        faults += contradictions
        if not contradictions:
            user = inherit(prefills[key].spec, pool.spec) if key else pool.spec
            decode = decode_pool(_manifest(pool, user), defaults)
            # An inherited setting is reported once, on the PrefillPool that states it.
            inherited = list(unsupported_settings(typed[key].spec)) if key else []
            own = (p for p in unsupported_settings(decode.spec) if p not in inherited)
            faults += _errors(pool, own)
            decodes.append(decode)
    if faults:
        raise InvalidSet(faults)
    return tuple(PoolSet(typed.get(key), tuple(decodes)) for key, decodes in members.items())


def _set_errors(
    decode: PoolDocument,
    prefills: Mapping[PrefillKey | None, PoolDocument],
    defaults: Defaults,
) -> Iterator[DocumentError]:
    """Why a DecodePool does not fit its set: no such PrefillPool, or contradictions."""
    if (key := decode.prefill_key) is None:
        return
    if key not in prefills:
        names = sorted(name for namespace, name in filter(None, prefills) if namespace == key[0])
        hint = nearest(key[1], names) or (f": there are {', '.join(names)}" if names else "")
        yield decode.document.error(
            "spec.prefillRef.name", f"no PrefillPool {key[1]!r} in namespace {key[0]}{hint}"
        )
        return
    prefill = prefills[key]
    merged = inherit(prefill.spec, decode.spec)
    contradictions = [
        decode.document.error(
            ("spec", *mismatch.stated_at),
            mismatch.message(str(decode), str(prefill), _location(mismatch, prefill)),
        )
        for mismatch in disagreements(prefill.spec, decode.spec, merged, defaults)
    ]
    yield from contradictions
    if not contradictions:
        # The CRD's rules again: an inherited field may break one together with a field of its own.
        for problem in problems(DECODE_POOL, {**decode.data, "spec": merged}):
            yield decode.document.error(
                problem.path, f"{problem.message} (with what {prefill} gives)"
            )


def _errors(pool: PoolDocument, pool_problems: Iterable[Problem]) -> list[DocumentError]:
    return [pool.document.error(problem.path, problem.message) for problem in pool_problems]


def _location(mismatch: Mismatch, prefill: PoolDocument) -> str:
    return f" ({prefill.document.where(('spec', *mismatch.path))})"


def _manifest(pool: PoolDocument, spec: Mapping[str, Any]) -> PoolManifest:
    metadata = pool.data["metadata"]
    annotations, own_labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    return PoolManifest(pool.kind, pool.name, pool.namespace, spec, annotations, own_labels)
