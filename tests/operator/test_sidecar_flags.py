"""Changing the section `sidecar` of a DecodePool: running pods get it, none is replaced."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.pods import sidecar_flags
from tandem_sidecar.main import main

from .pool_yaml import DECODE, PREFILL
from .simulated_cluster import SimulatedCluster, named, settled

BEFORE = [
    *("--prefill-timeout", "30s", "--kv-transfer-timeout", "10s"),
    *("--fallback-to-unified", "--retries", "2"),
]
"""The defaults as an earlier operator wrote them."""


def flags(cluster: SimulatedCluster, pool: str = "d") -> list[dict[str, Any]]:
    return [json.loads(pod.sidecar_flags or "{}") for pod in cluster.of(pool)]


def of_an_earlier_operator(cluster: SimulatedCluster, arguments: list[str]) -> None:
    """Make the DecodePool's revision and pods those of an operator that wrote arguments."""
    for body in cluster.revisions.values():
        spec = body["data"]["spec"]
        for container in spec.get("initContainers", ()):
            at = container["args"].index("--config")
            container["args"][at : at + 2] = arguments
            body["data"]["metadata"]["annotations"].pop(labels.SIDECAR_FLAGS)
            spec["volumes"] = [v for v in spec["volumes"] if "downwardAPI" not in v]
    for pod in cluster.of("d"):
        cluster._change(pod.name, sidecar_flags=None)


@pytest.mark.parametrize(
    ("edit", "flag", "value"),
    [({"prefillTimeout": "7s"}, "prefill-timeout", "7s"),
     ({"kvTransferTimeout": "8s"}, "kv-transfer-timeout", "8s"),
     ({"fallbackToUnified": False}, "fallback-to-unified", False),
     ({"retries": 0}, "retries", 0),
     ({"breakerFailures": 2}, "breaker-failures", 2),
     ({"streamKv": False}, "stream-kv", False),
     ({"breakerCooldown": "9s"}, "breaker-cooldown", "9s")],
)  # fmt: skip
def test_running_pods_get_the_settings_and_none_is_replaced(
    edit: dict[str, Any], flag: str, value: object
) -> None:
    cluster = settled(PREFILL, DECODE)
    before, revisions = set(cluster.pods), set(cluster.revisions)
    cluster.edit("DecodePool", "d", sidecar=edit)
    plan = cluster.reconcile()
    assert {label.name for label in plan.label_pods} == {pod.name for pod in cluster.of("d")}
    cluster.settle()
    assert (set(cluster.pods), set(cluster.revisions)) == (before, revisions)
    assert [entry[flag] for entry in flags(cluster)] == [value, value]
    assert cluster.condition("d", "Progressing")["reason"] == "Complete"
    # The template is not another one because of the annotation.
    assert cluster.condition("d", "UpdateAvailable")["status"] == "False"


def test_turning_on_resumed_streams_changes_no_pod() -> None:
    """The EPP asks for them, in its plans."""
    cluster = settled(PREFILL, DECODE)
    before, revisions, of_pods = set(cluster.pods), set(cluster.revisions), flags(cluster)
    cluster.edit("DecodePool", "d", routing={"resume": {"enabled": "always", "maxMoves": 3}})
    assert not cluster.reconcile().label_pods
    cluster.settle()
    assert (set(cluster.pods), set(cluster.revisions)) == (before, revisions)
    assert flags(cluster) == of_pods
    assert cluster.condition("d", "UpdateAvailable")["status"] == "False"


def test_new_pods_get_the_present_settings() -> None:
    cluster = settled(PREFILL, DECODE)
    cluster.edit("DecodePool", "d", sidecar={"retries": 5}, replicas=3)
    cluster.settle()
    cluster.remove_pod(cluster.of("d")[0].name)
    cluster.settle()
    assert [entry["retries"] for entry in flags(cluster)] == [5, 5, 5]


def test_pods_of_an_unreadable_pool_keep_the_settings_that_they_have() -> None:
    cluster = settled(PREFILL, DECODE)
    cluster.edit("DecodePool", "d", sidecar={"retries": 5})
    cluster.settle()
    cluster.edit("DecodePool", "d", sidecar={"retries": 6}, transfer={"requireRdma": True})
    cluster.remove_pod(cluster.of("d")[0].name)
    cluster.settle()
    assert [entry["retries"] for entry in flags(cluster)] == [5, 5]


def test_a_paused_pool_gets_new_settings_when_it_goes_on() -> None:
    cluster = settled(PREFILL, DECODE)
    cluster.edit("DecodePool", "d", sidecar={"retries": 5}, paused=True)
    cluster.settle()
    assert [entry["retries"] for entry in flags(cluster)] == [2, 2]
    cluster.edit("DecodePool", "d", paused=False)
    cluster.settle()
    assert [entry["retries"] for entry in flags(cluster)] == [5, 5]


def test_a_changed_or_removed_annotation_is_written_again() -> None:
    cluster = settled(PREFILL, DECODE)
    first, second = cluster.of("d")
    cluster._change(first.name, sidecar_flags="{}")
    cluster._change(second.name, sidecar_flags=None)
    cluster.settle()
    assert [entry["retries"] for entry in flags(cluster)] == [2, 2]


def test_pods_with_the_flags_as_arguments_stay_until_the_flags_change() -> None:
    cluster = settled(PREFILL, DECODE)
    of_an_earlier_operator(cluster, BEFORE)
    before = set(cluster.pods)
    cluster.settle()
    assert set(cluster.pods) == before
    assert flags(cluster) == [{}, {}]
    prefill = {pod.name for pod in cluster.of("p")}
    # Their sidecars would not notice: this edit replaces them, later ones no more.
    cluster.edit("DecodePool", "d", sidecar={"retries": 5})
    cluster.settle()
    after = set(cluster.pods)
    assert after & before == prefill
    assert [entry["retries"] for entry in flags(cluster)] == [5, 5]
    cluster.edit("DecodePool", "d", sidecar={"retries": 2})
    cluster.settle()
    assert set(cluster.pods) == after
    assert [entry["retries"] for entry in flags(cluster)] == [2, 2]


def test_a_pod_with_the_flags_as_arguments_is_replaced_to_get_breaker_settings() -> None:
    cluster = settled(PREFILL, DECODE)
    of_an_earlier_operator(cluster, BEFORE)
    before = {pod.name for pod in cluster.of("d")}
    cluster.edit("DecodePool", "d", sidecar={"breakerFailures": 2})
    cluster.settle()
    assert not before & {pod.name for pod in cluster.of("d")}
    assert [entry["breaker-failures"] for entry in flags(cluster)] == [2, 2]


def test_breaker_settings_are_the_sidecars_own_where_the_pool_sets_none() -> None:
    cluster = settled(PREFILL, DECODE)
    for entry in flags(cluster):
        assert not {"breaker-failures", "breaker-cooldown"} & set(entry)


def test_a_template_that_replaces_the_arguments_gets_no_annotation() -> None:
    own = {"spec": {"initContainers": [{"name": "sidecar", "args": ["--retries", "1"]}]}}
    cluster = settled(PREFILL, named(DECODE, "d", template=own))
    of_pods = copy.deepcopy(cluster.pods)
    cluster.edit("DecodePool", "d", sidecar={"retries": 5})
    plan = cluster.reconcile()
    assert plan.label_pods == ()
    assert set(cluster.pods) == set(of_pods)


@pytest.mark.parametrize(
    "containers",
    ["x", [1], [{"name": "sidecar", "args": 1}], [{"name": "sidecar", "args": [{}]}]],
)
def test_a_template_of_another_shape_has_no_flags(containers: Any) -> None:
    template = {"metadata": {}, "spec": {"initContainers": containers}}
    assert not sidecar_flags.reads_annotation(template)
    assert sidecar_flags.with_flags(template, "x") is template


def test_the_sidecar_reads_the_annotation(tmp_path: Path) -> None:
    settings = {"prefillTimeout": "1500ms", "breakerFailures": 2, "breakerCooldown": "9s"}
    cluster = settled(PREFILL, named(DECODE, "d", sidecar=settings))
    file = tmp_path / "flags.yaml"
    file.write_text(cluster.of("d")[0].sidecar_flags or "")
    parsed = main.make_context("tandem-sidecar", ["--config", str(file)]).params
    assert (parsed["prefill_timeout"], parsed["kv_transfer_timeout"]) == (1.5, 10.0)
    assert (parsed["fallback_to_unified"], parsed["retries"]) == (True, 2)
    assert (parsed["breaker_failures"], parsed["breaker_cooldown"]) == (2, 9.0)


def test_a_pass_that_changes_nothing_writes_nothing() -> None:
    cluster = settled(PREFILL, DECODE)
    assert cluster.plan().writes == 0
