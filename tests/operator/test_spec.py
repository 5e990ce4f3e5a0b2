"""The types have every field of the CRDs; msgspec would silently drop a missing one."""

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.resources.spec import DecodeSpec, PrefillSpec

from .full_pools import FULL
from .pool_yaml import PREFILL, documents
from .test_crd import root


@pytest.mark.parametrize(
    ("kind", "spec"), [("PrefillPool", PrefillSpec), ("DecodePool", DecodeSpec)]
)
def test_every_field_of_the_schema_has_its_type(kind: str, spec: type[msgspec.Struct]) -> None:
    schema = root(kind)["properties"]["spec"]
    assert list(missing(schema, inspect.type_info(spec))) == []


def missing(schema: dict[str, Any], kind: inspect.Type, at: str = "spec") -> list[str]:
    """Paths of `schema` that the type of this node does not have."""
    schema = schema.get("items", schema)
    struct = struct_in(kind)
    if struct is None or "properties" not in schema:
        return []
    fields = {field.encode_name: field.type for field in struct.fields}
    lacking = [f"{at}.{name}" for name in schema["properties"] if name not in fields]
    below = (
        path
        for name, node in schema["properties"].items()
        if name in fields
        for path in missing(node, fields[name], f"{at}.{name}")
    )
    return [*lacking, *below]


def struct_in(kind: inspect.Type) -> inspect.StructType | None:
    """The struct in a type such as `X | None` or `tuple[X, ...]`; None for other types."""
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(struct_in, kind.types)), None)
    if isinstance(kind, inspect.VarTupleType):
        return struct_in(kind.item_type)
    return kind if isinstance(kind, inspect.StructType) else None


@pytest.mark.parametrize("pool", [pool for pool in FULL if pool["kind"] == "PrefillPool"])
def test_full_pools_convert_to_types(pool: dict[str, Any]) -> None:
    (pool_set,) = parse_pools(documents({**pool, "metadata": PREFILL["metadata"]}))
    assert pool_set.prefill is not None
    assert pool_set.prefill.spec.model.name == pool["spec"]["model"]["name"]
