"""What a user wrote, told apart from what a schema filled in, and its short hash."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from ..crd import load_schema

_ABSENT: Final = object()


def stated(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` of a pool of `kind` without what equals the schema's defaults.

    A default that a later schema adds to an old object is nothing its user wrote, and so no reason
    to restart its pods.
    """
    found: dict[str, Any] = _without(load_schema(kind)["properties"]["spec"], spec)
    return found


def short_hash(value: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the value's canonical JSON."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def _without(schema: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, list):
        return [_without(schema.get("items", {}), item) for item in value]
    if not isinstance(value, Mapping):
        return value
    fields = schema.get("properties", {})
    kept = {}
    for name, item in value.items():
        field = fields.get(name, {})
        item = _without(field, item)
        default = field.get("default", _ABSENT)
        if default is _ABSENT or item != _without(field, default):
            kept[name] = item
    return kept
