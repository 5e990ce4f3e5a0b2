"""The strategic merge of templates."""

from typing import Any

import pytest

from tandem_operator.pods.merge import merge

BASE: dict[str, Any] = {
    "restartPolicy": "Never",
    "nodeSelector": {"a": "1"},
    "containers": [
        {
            "name": "engine",
            "args": ["x"],
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            "ports": [{"containerPort": 1, "name": "one"}],
            "resources": {"limits": {"gpu": "1"}},
        }
    ],
    "tolerations": [{"key": "a"}],
}


def engine(patch: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = merge(BASE, {"containers": [{"name": "engine", **patch}]})
    return dict(merged["containers"][0])


def test_mappings_merge_and_neither_side_is_changed() -> None:
    before = repr(BASE)
    assert merge(BASE, {"nodeSelector": {"b": "2"}})["nodeSelector"] == {"a": "1", "b": "2"}
    assert engine({"resources": {"limits": {"memory": "1Gi"}}})["resources"] == {
        "limits": {"gpu": "1", "memory": "1Gi"}
    }
    assert repr(BASE) == before


def test_null_removes_a_field() -> None:
    assert "restartPolicy" not in merge(BASE, {"restartPolicy": None})
    assert merge(BASE, {"nodeSelector": {"a": None}})["nodeSelector"] == {}


def test_containers_env_and_ports_merge_by_their_key() -> None:
    assert engine({"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]})["env"] == [
        {"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"},
    ]  # fmt: skip
    assert engine({"ports": [{"containerPort": 1, "hostPort": 2}]})["ports"] == [
        {"containerPort": 1, "name": "one", "hostPort": 2}
    ]
    added = merge(BASE, {"containers": [{"name": "log", "image": "l"}]})["containers"]
    assert [c["name"] for c in added] == ["engine", "log"]


@pytest.mark.parametrize("field", ["args", "command"])
def test_plain_lists_are_replaced(field: str) -> None:
    assert engine({field: ["y"]})[field] == ["y"]


def test_tolerations_are_replaced_as_kubernetes_does() -> None:
    assert merge(BASE, {"tolerations": [{"key": "b"}]})["tolerations"] == [{"key": "b"}]


def test_directives_delete_and_replace() -> None:
    assert engine({"env": [{"name": "A", "$patch": "delete"}]})["env"] == [
        {"name": "B", "value": "2"}
    ]
    replaced = merge(BASE, {"nodeSelector": {"$patch": "replace", "z": "1"}})
    assert replaced["nodeSelector"] == {"z": "1"}
    absent = {"containers": [{"name": "none", "$patch": "delete"}]}
    assert merge(BASE, absent)["containers"] == BASE["containers"]


def test_a_new_mapping_in_a_patch_is_added() -> None:
    assert merge({}, {"a": {"b": {"c": 1, "d": None}}}) == {"a": {"b": {"c": 1}}}


def test_a_handler_of_a_probe_replaces_the_rendered_one() -> None:
    probe = {"exec": {"command": ["wait"]}, "periodSeconds": 1, "failureThreshold": 3}
    http = {"httpGet": {"path": "/health", "port": 8000}}
    assert merge({"startupProbe": probe}, {"startupProbe": http}) == {
        "startupProbe": {**http, "periodSeconds": 1, "failureThreshold": 3}
    }
    longer = {"startupProbe": {"failureThreshold": 9}}
    assert merge({"startupProbe": probe}, longer)["startupProbe"] == {
        **probe,
        **longer["startupProbe"],
    }
