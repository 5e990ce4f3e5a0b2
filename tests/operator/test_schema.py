"""Defaults and structural validation from the packaged CRD."""

from typing import Any

import pytest

from tandem_operator.crd import KINDS
from tandem_operator.resources.schema import Problem, defaulted, problems

from .full_pools import FULL
from .pool_yaml import DECODE, PREFILL, decode_pool, prefill_pool
from .test_crd import nodes, root

# (spec fields, where the error is, a part of its message)
MALFORMED: list[tuple[dict[str, Any], str, str]] = [
    ({"replica": 3}, "spec.replica", "unknown field (did you mean 'replicas'?)"),
    ({"engine": {"zzz": 1}}, "spec.engine.zzz", "unknown field: known are type, version"),
    ({"replicas": "3"}, "spec.replicas", "expected an integer, got a string: '3'"),
    ({"replicas": True}, "spec.replicas", "expected an integer, got a boolean: True"),
    ({"replicas": 2.0}, "spec.replicas", "expected an integer, got a number: 2.0"),
    ({"replicas": -1}, "spec.replicas", "-1 is below 0"),
    ({"engine": {"gpuMemoryUtilization": 0}}, "spec.engine.gpuMemoryUtilization",
     "0 is not above 0"),
    ({"replicas": 10**30}, "spec.replicas", "is above 1000"),
    ({"model": []}, "spec.model", "expected a mapping, got a list: []"),
    ({"model": {}}, "spec.model.name", "is required"),
    ({"model": {"name": ""}}, "spec.model.name", "is empty"),
    ({"model": {"name": "m" * 300}}, "spec.model.name", "is too long: 253 is the most"),
    ({"engine": {"type": "vlm"}}, "spec.engine.type",
     "'vlm' is none of vllm, torch (did you mean 'vllm'?)"),
    ({"drain": {"timeout": "2 minutes"}}, "spec.drain.timeout", "'2 minutes' is malformed"),
    ({"drain": {"timeout": "2m\n"}}, "spec.drain.timeout", "is malformed"),
    ({"drain": {"timeout": 120}}, "spec.drain.timeout", "expected a string, got an integer"),
    ({"rollout": {"maxSurge": "a lot"}}, "spec.rollout.maxSurge", "'a lot' is malformed"),
    ({"rollout": {"maxSurge": []}}, "spec.rollout.maxSurge",
     "expected a whole number or a string, got [] (Pods above the desired number"),
    ({"model": {"name": "m", "servedNames": ["a", "a"]}}, "spec.model.servedNames.1",
     "'a' is listed twice: remove one"),
    ({"engine": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
     "spec.engine.env.1", "'A' is listed twice: remove one"),
    ({"accelerator": {"nodeSelector": {"zone": 1}}}, "spec.accelerator.nodeSelector.zone",
     "expected a string, got an integer: 1"),
    ({"template": {"containers": []}}, "spec.template.containers", "unknown field"),
]  # fmt: skip


def errors_of(kind: str, data: Any) -> list[tuple[str, str]]:
    return [(".".join(map(str, p.path)), p.message) for p in problems(kind, defaulted(kind, data))]


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        (
            "PrefillPool",
            {"transfer": {"loadFailurePolicy": "fail"}},
            "unknown field here: it is spec.transfer.loadFailurePolicy of DecodePool",
        ),
        (
            "PrefillPool",
            {"loadFailurePolicy": "fail"},
            "unknown field here: it is spec.transfer.loadFailurePolicy of DecodePool",
        ),
        (
            "DecodePool",
            {"blockSize": 16},
            "unknown field here: it is spec.engine.blockSize of PrefillPool and DecodePool",
        ),
    ],
)
def test_a_field_at_the_wrong_place_is_told_the_right_one(
    kind: str, spec: dict[str, Any], message: str
) -> None:
    pool = prefill_pool(**spec) if kind == "PrefillPool" else decode_pool(**spec)
    assert message in dict(errors_of(kind, pool)).values()


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_pools_are_valid_and_cover_every_field(kind: str) -> None:
    pools = [pool for pool in FULL if pool["kind"] == kind]
    assert [errors_of(kind, pool) for pool in pools] == [[]] * len(pools)
    written = {path for pool in pools for path in field_paths(pool["spec"])}
    fields = {path for path, _ in nodes(root(kind)["properties"]["spec"]) if path}
    assert fields - written == set()


def field_paths(value: Any, at: str = "") -> set[str]:
    """Paths as `nodes` gives them: an item of a list or of a free map is `[]`."""
    if isinstance(value, dict):
        return {
            path
            for key, item in value.items()
            for name in (f"{at}.{key}", f"{at}[]")
            for path in {name} | field_paths(item, name)
        }
    items = value if isinstance(value, list) else []
    return {path for item in items for path in {f"{at}[]"} | field_paths(item, f"{at}[]")}


def test_the_minimal_pair_is_valid() -> None:
    assert errors_of("PrefillPool", PREFILL) == []
    assert errors_of("DecodePool", DECODE) == []


def test_defaults_are_filled_in_without_changing_the_input() -> None:
    data = decode_pool(sidecar={"retries": 5}, parallelism={"tensor": 1})
    spec = defaulted("DecodePool", data)["spec"]
    assert spec["role"] == "decode"
    assert spec["drain"] == {"timeout": "120s"}
    assert spec["sidecar"] == {
        "prefillTimeout": "30s", "kvTransferTimeout": "10s", "fallbackToUnified": True,
        "retries": 5,
    }  # fmt: skip
    assert spec["routing"] == {
        "epp": {"enabled": True}, "envoy": {"enabled": True}, "inferencePool": {"enabled": False},
        "front": "envoy", "split": "auto",
    }  # fmt: skip
    assert spec["parallelism"]["pipeline"] == 1
    assert "replicas" not in defaulted("DecodePool", {"spec": {}})["spec"]
    assert data["spec"]["sidecar"] == {"retries": 5}


def test_a_default_is_never_shared_between_objects() -> None:
    first = defaulted("DecodePool", DECODE)
    first["spec"]["drain"]["timeout"] = "1s"
    assert defaulted("DecodePool", DECODE)["spec"]["drain"] == {"timeout": "120s"}


def test_null_counts_as_left_out_except_in_the_template() -> None:
    data = decode_pool(drain=None, scaling=None, template={"spec": {"hostname": None}})
    spec = defaulted("DecodePool", data)["spec"]
    assert spec["drain"] == {"timeout": "120s"}
    assert "scaling" not in spec
    assert spec["template"] == {"spec": {"hostname": None}}


@pytest.mark.parametrize(("spec", "path", "message"), MALFORMED)
def test_structural_errors_name_path_and_cause(
    spec: dict[str, Any], path: str, message: str
) -> None:
    ((at, text),) = errors_of("PrefillPool", prefill_pool(**spec))
    assert at == path
    assert message in text


def test_all_errors_are_found_at_once() -> None:
    assert len(errors_of("PrefillPool", prefill_pool(replica=1, paused="no", drain=[]))) == 3


def test_rules_are_evaluated_only_for_a_valid_structure() -> None:
    both = {"scaling": {"maxReplicas": 2}, "replicas": 1}
    assert problems("PrefillPool", prefill_pool(**both, paused=1)) == [
        Problem(("spec", "paused"), "expected true or false, got an integer: 1")
    ]


@pytest.mark.parametrize("name", ["Upper", "a" * 51, "dotted.name", "1st", ""])
def test_a_pool_name_must_fit_pod_and_service_names(name: str) -> None:
    assert [at for at, _ in errors_of("PrefillPool", {**PREFILL, "metadata": {"name": name}})][
        :1
    ] == ["metadata.name"]


def test_other_metadata_is_not_validated_here() -> None:
    metadata = {"name": "p", "labels": {"team": "a"}, "namespace": None, "annotations": {}}
    assert errors_of("PrefillPool", {**PREFILL, "metadata": metadata}) == []
