"""The packaged CustomResourceDefinitions: the one source of defaults and validation.

A wheel carries them beside this module; a checkout has them in `crds/`.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final, NewType

import yaml

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PLURALS, PREFILL_POOL

Schema = NewType("Schema", dict[str, Any])
"""An OpenAPI v3 structural schema, as `openAPIV3Schema` holds one."""

PRESERVE_UNKNOWN: Final = "x-kubernetes-preserve-unknown-fields"
RULES: Final = "x-kubernetes-validations"
LIST_TYPE: Final = "x-kubernetes-list-type"
LIST_MAP_KEYS: Final = "x-kubernetes-list-map-keys"

KINDS: Final = (PREFILL_POOL, DECODE_POOL)

_NAMESPACE: Final = {
    "type": "string",
    "description": "Namespace of the pool.",
    "maxLength": 63,
    "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
}

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where it is installed. Python's needs 0.4 s for these files, in every command
that reads pools."""

_PACKAGED: Final = Path(__file__).parent / "crds"
_CHECKOUT: Final = Path(__file__).parents[2] / "crds"


def crd_directory() -> Path:
    """The directory of the CRD files."""
    return _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT


@cache
def load_crd(kind: str) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind of `KINDS`, as written in its file."""
    text = (crd_directory() / f"{PLURALS[kind]}.yaml").read_text(encoding="utf-8")
    crd: dict[str, Any] = yaml.load(text, _LOADER)  # noqa: S506 - both loaders are safe ones
    return crd


def schema_version() -> int:
    """The number of the schema in these files; both CRDs have the same."""
    return int(load_crd(PREFILL_POOL)["metadata"]["annotations"][labels.SCHEMA_VERSION])


@cache
def load_schema(kind: str) -> Schema:
    """The schema of a kind, with the metadata that the API server adds to every object."""
    # Every level that changes is copied: `load_crd` returns the same cached object to all.
    schema = Schema(dict(load_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    metadata = schema["properties"]["metadata"]
    fields = {**metadata["properties"], "namespace": _NAMESPACE}
    typed = {"properties": fields, "required": ["name"], PRESERVE_UNKNOWN: True}
    schema["properties"] = {**schema["properties"], "metadata": {**metadata, **typed}}
    schema["required"] = [*schema["required"], "metadata"]
    return schema
