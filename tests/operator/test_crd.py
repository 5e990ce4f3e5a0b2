"""The CRD files: valid structural schemas, bounded and described, shared fields equal."""

import hashlib
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.connectors import ConnectorName
from tandem_contract.custom_resources import DECODE_POOL, PLURALS
from tandem_operator.crd import (
    KINDS,
    LIST_MAP_KEYS,
    LIST_TYPE,
    RULES,
    load_crd,
    schema_version,
)
from tandem_operator.resources.cel import broken_rules

RECORDED = Path(__file__).parent / "golden" / "schema-version.txt"

Node = dict[str, Any]


def root(kind: str) -> Node:
    schema: Node = load_crd(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """`schema` and every node below it."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_structural(kind: str) -> None:
    for _, node in nodes(root(kind)):
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        else:
            assert_structural(node)


def assert_structural(node: Node) -> None:
    assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}
    assert not {"$ref", "oneOf", "allOf", "anyOf", "not", "nullable", "title"} & set(node)
    assert not ("properties" in node and "additionalProperties" in node)
    if node["type"] == "object":
        contents = {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"}
        assert contents & set(node)
        assert set(node.get("required", ())) <= set(node.get("properties", ()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind: str) -> None:
    # At the root's metadata the API server allows restrictions of the name only.
    bare = [path for path, node in nodes(root(kind)) if "description" not in node]
    assert bare == [".metadata"]
    assert set(root(kind)["properties"]["metadata"]) == {"type", "properties"}


@pytest.mark.parametrize("kind", KINDS)
def test_lists_and_maps_are_bounded_to_limit_rule_cost(kind: str) -> None:
    for path, node in nodes(root(kind)):
        if node.get("type") == "array":
            assert node["maxItems"] <= 128, path
            assert node[LIST_TYPE] in {"atomic", "set", "map"}
        if node.get(LIST_TYPE) == "map":
            assert set(node[LIST_MAP_KEYS]) <= set(node["items"]["required"])
        if "additionalProperties" in node:
            assert node["maxProperties"] <= 64, path


@pytest.mark.parametrize("kind", KINDS)
def test_strings_of_the_spec_are_bounded(kind: str) -> None:
    for path, node in nodes(root(kind)["properties"]["spec"]):
        if node.get("type") == "string":
            assert "enum" in node or "maxLength" in node, path
        if node.get("type") in {"integer", "number"}:
            assert {"minimum", "maximum"} <= set(node), path


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_cover_the_whole_value(kind: str) -> None:
    for path, node in nodes(root(kind)):
        if "pattern" in node:
            assert node["pattern"].startswith("^"), path
            assert node["pattern"].endswith("$"), path
            re.compile(node["pattern"])


@pytest.mark.parametrize("kind", KINDS)
def test_rules_have_messages_and_existing_field_paths(kind: str) -> None:
    for path, node in nodes(root(kind)):
        for rule in node.get(RULES, ()):
            assert rule["message"], path
            assert "\n" not in rule["message"]
            below = node
            for step in filter(None, rule.get("fieldPath", "").split(".")):
                below = below["properties"][step]


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_break_no_rule_before_nested_defaults_are_filled_in(kind: str) -> None:
    # The API server checks each default by itself when the CRD is created.
    for path, node in nodes(root(kind)):
        if "default" in node:
            assert list(broken_rules(node, node["default"])) == [], path


def test_shared_fields_are_equal_in_both_kinds() -> None:
    prefill = deepcopy(root("PrefillPool")["properties"])
    decode = deepcopy(root("DecodePool")["properties"])
    assert prefill["status"] == decode["status"]
    assert prefill["metadata"] == decode["metadata"]
    prefill_fields, decode_fields = prefill["spec"]["properties"], decode["spec"]["properties"]
    for name in ("prefillRef", "role", "sidecar", "routing"):
        del decode_fields[name]
    del decode_fields["transfer"]["properties"]["loadFailurePolicy"]
    for name in ("ratio", "gpuBudget", "scaleToZero"):
        del decode_fields["scaling"]["properties"][name]
    assert prefill_fields == decode_fields
    shared_rules = prefill["spec"][RULES]
    assert decode["spec"][RULES][-len(shared_rules) :] == shared_rules


@pytest.mark.parametrize("kind", KINDS)
def test_connectors_and_plurals_are_the_contracts(kind: str) -> None:
    transfer = root(kind)["properties"]["spec"]["properties"]["transfer"]["properties"]
    assert set(transfer["connector"]["enum"]) == set(ConnectorName)
    assert load_crd(kind)["spec"]["names"]["plural"] == PLURALS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_names_columns_and_subresources(kind: str) -> None:
    spec = load_crd(kind)["spec"]
    (version,) = spec["versions"]
    assert (spec["group"], version["name"]) == (labels.GROUP, labels.VERSION)
    assert spec["names"]["shortNames"] == ["dp" if kind == DECODE_POOL else "pp"]
    assert spec["names"]["categories"] == ["llm"]
    assert load_crd(kind)["metadata"]["name"] == f"{spec['names']['plural']}.{labels.GROUP}"
    columns = version["additionalPrinterColumns"]
    assert [c["name"].upper() for c in columns if not c.get("priority")] == [
        "MODEL", "DESIRED", "READY", "UP-TO-DATE", "PAIRED", "STATUS", "REASON", "AGE",
    ]  # fmt: skip
    assert [c["name"].upper() for c in columns if c.get("priority")] == [
        "TP", "ACCEL", "CONNECTOR", "REVISION", "ENDPOINT",
    ]  # fmt: skip
    paths = {path for path, _ in nodes(root(kind))}
    scale = version["subresources"]["scale"]
    assert set(scale.values()) <= paths
    assert version["subresources"]["status"] == {}
    plain = [c["jsonPath"] for c in columns if "[" not in c["jsonPath"]]
    assert set(plain) - {".metadata.creationTimestamp"} <= paths


def test_a_changed_schema_has_a_new_number() -> None:
    numbers = {load_crd(kind)["metadata"]["annotations"][labels.SCHEMA_VERSION] for kind in KINDS}
    assert numbers == {str(schema_version())}
    schemas = json.dumps([undescribed(load_crd(kind)["spec"]) for kind in KINDS], sort_keys=True)
    now = hashlib.sha256(schemas.encode()).hexdigest()
    number, recorded = RECORDED.read_text().split()
    changed = now != recorded
    assert (changed, int(number)) == (False, schema_version()), (
        f"the schema in crds/ is not the one recorded as version {number}: raise the annotation"
        f" {labels.SCHEMA_VERSION} in both files above the last release's (operators compare it"
        f" with that of the installed CRDs), then write that number and {now} into {RECORDED}"
    )


def undescribed(value: Any) -> Any:
    """The schema without descriptions, on which no operator relies."""
    if isinstance(value, dict):
        return {
            key: undescribed(item)
            for key, item in value.items()
            if not (key == "description" and isinstance(item, str))
        }
    return [undescribed(item) for item in value] if isinstance(value, list) else value
