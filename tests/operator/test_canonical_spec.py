"""Which edits of a spec are a new revision, and which revisions of an earlier operator stay."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import RevisionState
from tandem_operator.planning.revisions import choose_targets, differs, render_template
from tandem_operator.resources.pools import Pool
from tandem_operator.resources.resolve import Defaults

from .pool_yaml import DECODE, PREFILL, pair
from .simulated_cluster import UNIFIED, SimulatedCluster, named, revisions, settled

DEFAULTS = Defaults(vllm_version="0.32.0")
NOTHING: list[dict[str, Any]] = [
    {"transfer": {}},
    {"engine": {}},
    {"engine": {"extraArgs": [], "env": [], "resources": {"limits": {}}}},
    {"transfer": {"backends": [], "connectors": []}, "template": {}},
    {"template": {"metadata": {}, "spec": {}}},
    {"drain": {"timeout": "120s"}, "sidecar": {}},
    {"accelerator": {"count": 1, "nodeSelector": {}, "tolerations": []}},
]
"""Edits that state nothing beyond the minimal DecodePool."""


@pytest.mark.parametrize("edit", NOTHING)
def test_an_edit_that_states_nothing_rolls_no_pod(edit: dict[str, Any]) -> None:
    cluster = settled(PREFILL, DECODE)
    before = set(cluster.pods)
    cluster.edit("DecodePool", "d", **edit)
    plan = cluster.reconcile()
    assert (plan.create_revisions, plan.create_pods, plan.delete_pods) == ((), (), ())
    cluster.settle()
    assert set(cluster.pods) == before


def test_removing_a_field_returns_to_the_revision_without_its_section() -> None:
    cluster = settled(PREFILL, DECODE)
    (first,) = set(revisions(cluster, "d"))
    cluster.edit("DecodePool", "d", transfer={"rdma": {"resource": "rdma/ib"}})
    cluster.settle()
    assert first not in revisions(cluster, "d")
    cluster.edit("DecodePool", "d", transfer={})
    cluster.settle()
    assert set(revisions(cluster, "d")) == {first}


def test_an_empty_field_that_is_a_choice_is_part_of_the_revision() -> None:
    torch = {"type": "torch"}
    tiny = pair({"engine": torch, "model": {"name": "m", "source": {"tiny": {}}}})
    path = pair({"engine": torch, "model": {"name": "m", "source": {"path": "/m"}}})
    assert tiny[0].prefill is not None
    assert path[0].prefill is not None
    assert tiny[0].prefill.revision != path[0].prefill.revision
    # Golden: the revision of the quickstart's kind of pool, as today's operators know it.
    assert tiny[0].prefill.revision == tiny[0].prefill.former_revisions[-1]


def test_an_empty_volume_of_the_template_is_part_of_the_revision() -> None:
    def revision(volume: dict[str, Any]) -> str:
        spec = {"volumes": [{"name": "v", **volume}]}
        return str(pair({}, {"template": {"spec": spec}})[0].decodes[0].revision)

    assert revision({"emptyDir": {}}) != revision({})


def pinned_under(pool: Pool, revision: str, name: str) -> RevisionState:
    """The ControllerRevision of a pool as an earlier operator named it."""
    return RevisionState(
        name=f"{name}-{revision}", uid="r", pool=name, kind="DecodePool", revision=revision,
        compat=pool.compat, number=1, owner=None, created=0.0,
        template=render_template(pool, revision, DEFAULTS),
    )  # fmt: skip


def test_a_revision_pinned_under_the_earlier_recipe_stays() -> None:
    (pool_set,) = pair({}, {"transfer": {}, "engine": {"extraArgs": []}})
    pool = pool_set.decodes[0]
    assert pool.revision != pool.former_revisions[-1]
    former = pinned_under(pool, pool.former_revisions[-1], "d")
    targets = choose_targets({"d": pool}, {"d": [former]}, DEFAULTS)
    assert targets["d"].pinned == former


def with_prefill_ref(cluster: SimulatedCluster) -> None:
    """Add the field to the unified pool, and the PrefillPool that it names."""
    pool = copy.deepcopy(cluster.objects["DecodePool", "u"])
    pool["spec"]["prefillRef"] = {"name": "p"}
    cluster.apply_pool(pool)
    cluster.apply_pool(PREFILL)


def engine_args(cluster: SimulatedCluster) -> list[bool]:
    """Of each pod of the unified pool, whether its engine hands off."""
    bodies = [cluster.bodies[pod.name] for pod in cluster.of("u")]
    return ["--kv-transfer-config" in body["spec"]["containers"][0]["args"] for body in bodies]


def test_adding_a_prefill_ref_to_a_unified_pool_rolls_its_pods() -> None:
    cluster = settled(UNIFIED)
    assert engine_args(cluster) == [False, False]
    with_prefill_ref(cluster)
    cluster.reconcile()
    assert cluster.condition("u", "Progressing")["reason"] == "RollingOut"
    cluster.settle()
    assert engine_args(cluster) == [True, True]
    pool = copy.deepcopy(UNIFIED)
    cluster.apply_pool(pool)
    del cluster.objects["PrefillPool", "p"]
    cluster.settle()
    assert engine_args(cluster) == [False, False]


@pytest.mark.parametrize("splits", [True, False])
def test_a_unified_pool_of_an_earlier_operator_stays_and_still_reacts_to_prefill_ref(
    splits: bool,
) -> None:
    alone, paired = named(UNIFIED, "u"), named(UNIFIED, "u", prefillRef={"name": "p"})
    pools = {
        True: parsed(PREFILL, paired),
        False: parsed(alone),
    }
    pool = pools[splits]
    # Before, both had the same name.
    assert pools[True].revision != pools[False].revision
    assert pools[True].former_revisions[-1] == pools[False].former_revisions[-1]
    former = pinned_under(pool, pool.former_revisions[-1], "u")
    targets = choose_targets({"u": pool}, {"u": [former]}, DEFAULTS)
    assert targets["u"].pinned == former
    other = pools[not splits]
    targets = choose_targets({"u": other}, {"u": [former]}, DEFAULTS)
    assert targets["u"].pinned is None
    assert targets["u"].revision != former.revision


def test_a_unified_pool_whose_offloading_an_earlier_operator_ignored_rolls_no_pod() -> None:
    pool = parsed(named(UNIFIED, "u", transfer={"connector": "offloading"}))
    for revision in (pool.revision, pool.former_revisions[-1]):
        pinned = pinned_under(pool, revision, "u")
        template = copy.deepcopy(dict(pinned.template))
        args = template["spec"]["containers"][0]["args"]
        at = args.index("--kv-transfer-config")
        del args[at : at + 2]
        pinned = replace(pinned, template=template)
        targets = choose_targets({"u": pool}, {"u": [pinned]}, DEFAULTS)
        assert targets["u"].pinned == pinned


def parsed(*objects: dict[str, Any]) -> Pool:
    cluster = SimulatedCluster(*objects)
    key = next(key for key in cluster.plan().pools if key.name == "u")
    pool = cluster.plan().pools[key].pool
    assert pool is not None
    return pool


def test_pods_whose_data_ports_an_earlier_operator_left_to_the_kernel_stay() -> None:
    """Their pool reports that an update is available, and its pods keep their label-less policy."""
    (pool_set,) = pair()
    assert pool_set.prefill is not None
    pool = pool_set.prefill
    rendered = pinned_under(pool, pool.revision, "p")
    template = copy.deepcopy(dict(rendered.template))
    del template["metadata"]["labels"][labels.HANDOFF_PORTS]
    [engine] = template["spec"]["containers"]
    engine["env"] = [entry for entry in engine["env"] if entry["name"] != "UCX_TCP_PORT_RANGE"]
    former = replace(rendered, template=template)
    target = choose_targets({"p": pool}, {"p": [former]}, DEFAULTS)["p"]
    assert target.pinned == former
    assert differs(render_template(pool, target.revision, DEFAULTS), former.template)
