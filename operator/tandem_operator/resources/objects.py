"""YAML documents as pool objects: each valid by itself, with the schema's defaults."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.documents import Document, DocumentError

from ..crd import KINDS, PREFILL_POOL
from ..errors import InvalidPool
from .schema import Path_, defaulted, nearest, problems

_DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True)
class PoolObject:
    """One valid custom resource and where it was written."""

    document: Document
    data: Mapping[str, Any] = field(repr=False)
    """With the schema's defaults."""

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
    def prefill_key(self) -> tuple[str, str] | None:
        """Namespace and name of the PrefillPool of its set; None for a pool that stands alone."""
        if self.kind == PREFILL_POOL:
            return self.namespace, self.name
        ref = self.spec.get("prefillRef")
        return (self.namespace, ref["name"]) if ref else None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def valid_objects(documents: Sequence[Document]) -> list[PoolObject]:
    """Every document as an object. Raises InvalidPool naming all that is wrong with any."""
    faults: list[DocumentError] = []
    objects = []
    for document in documents:
        found = list(_no_pool(document)) or list(_no_json(document, document.data, ()))
        if not found:
            data = defaulted(document.data["kind"], document.data)
            found = [document.error(p.path, p.message) for p in problems(data["kind"], data)]
            objects.append(PoolObject(document, data))
        faults += found
    if faults:
        raise InvalidPool(faults)
    return objects


def _no_pool(document: Document) -> Iterator[DocumentError]:
    """Why a document is not one of our objects at all."""
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


def _no_json(document: Document, value: Any, path: Path_) -> Iterator[DocumentError]:
    """YAML holds more than an API object can: dates, sets, keys that are no strings."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield document.error(path, f"key {key!r} is no string: put it in quotes")
            else:
                yield from _no_json(document, item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _no_json(document, item, (*path, i))
    elif value is not None and not isinstance(value, str | int | float):
        yield document.error(path, f"{value} is no JSON value: put it in quotes")
    elif isinstance(value, float) and not abs(value) < float("inf"):
        yield document.error(path, f"{value} is no JSON number")
