"""Sets under any order of edits, mishaps, deaths of the operator and broken objects."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .full_pools import FULL, paths
from .pool_yaml import DECODE, PREFILL
from .set_world import World, named, settled


@pytest.mark.parametrize(
    "broken",
    [{"replicas": "two"}, {"replicas": -1}, {"model": 5}, {"engine": "x"}, {"accelerator": []},
     {"rollout": {"maxSurge": "x%"}},
     {"transfer": {"connector": "storage"}}, {"engine": {"version": "0.1"}}],
)  # fmt: skip
def test_what_cannot_be_read_is_left_alone_and_stalls_nobody(broken: dict[str, Any]) -> None:
    world = settled(PREFILL, DECODE, named(DECODE, "e"))
    before = set(world.pods)
    world.objects["DecodePool", "d"]["spec"] |= broken
    world.objects["DecodePool", "d"]["metadata"]["generation"] += 1
    lost = world.of("e")[0].name
    world.gone(lost)
    world.edit("DecodePool", "e", replicas=3)
    world.settle()
    assert before <= set(world.pods)
    assert len(world.of("e")) == 3
    assert world.condition("d", "Stalled")["reason"] in ("InvalidSpec", "Mismatch")
    assert world.condition("d", "Stalled")["message"]


@pytest.mark.parametrize("writes", range(14))
def test_a_process_that_dies_after_any_write_is_followed_by_the_same_end(writes: int) -> None:
    def end(*, dies: bool) -> tuple[set[str], set[str], set[str]]:
        world = World()
        for change in ({}, {"replicas": 4}, {"engine": {"maxNumSeqs": 3}}, {"replicas": 1}):
            world.edit("DecodePool", "d", **change)
            if dies:
                world.reconcile(writes=writes)
            world.settle()
        return set(world.pods), set(world.revisions), set(world.budgets)

    assert end(dies=True) == end(dies=False)


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("PrefillPool", "p", {"model": {"name": "org/other"}}),
    ("PrefillPool", "p", {"model": {"name": "org/model"}}),
    ("PrefillPool", "p", {"replicas": 3}),
    ("PrefillPool", "p", {"replicas": 0}),
    ("PrefillPool", "p", {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}),
    ("DecodePool", "d", {"engine": {"maxNumSeqs": 3}}),
    ("DecodePool", "d", {"engine": {"dtype": "float16"}}),
    ("DecodePool", "d", {"replicas": 1}),
    ("DecodePool", "d", {"replicas": 4}),
    ("DecodePool", "d", {"paused": True}),
    ("DecodePool", "d", {"routing": {"endpoint": "chat"}}),
]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_happens_the_set_comes_to_its_spec_and_to_rest(data: st.DataObject) -> None:
    world = World(PREFILL, DECODE)
    for _ in range(data.draw(st.integers(1, 10))):
        kind, name, change = data.draw(st.sampled_from(CHANGES))
        if data.draw(st.booleans()):
            world.edit(kind, name, **change)
        world.reconcile(writes=data.draw(st.none() | st.integers(0, 8)))
        for pod in sorted(world.pods):
            mishap(world, pod, data.draw(st.sampled_from(MISHAPS)))
        world.now += data.draw(st.sampled_from([1, 30, 900]))
        for pool in ("p", "d"):
            assert len([one for one in world.of(pool) if one.active]) <= 4 + 4
    world.edit("DecodePool", "d", paused=False, engine=None)
    for pod in sorted(world.pods):
        if world.pods[pod].phase == "Failed":
            world.now += 300
    world.settle()
    for kind, pool in (("PrefillPool", "p"), ("DecodePool", "d")):
        wanted = world.objects[kind, pool]["spec"]["replicas"]
        status = world.status(pool, kind)
        found = world.of(pool)
        assert [one.ready for one in found] == [True] * wanted
        assert {one.revision for one in found} <= {status["updateRevision"]}
        assert status["currentRevision"] == status["updateRevision"]
        assert status["readyReplicas"] == status["updatedReplicas"] == wanted
    assert len({pod.compat for pod in world.pods.values()}) <= 1


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["30s", "nixl", "multi", "torch", "vllm", "1", "0%", "/m"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "spec", "count", "containers", "env"]) | st.text(),
                      inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_value_anywhere_in_one_pool_leaves_the_others_pods_to_their_plan(
    data: st.DataObject,
) -> None:
    world = World(
        *(named(pool, pool["metadata"]["name"], paused=False) for pool in (FULL[0], FULL[4])),
        named(DECODE, "other"),
    )
    kind, name = data.draw(st.sampled_from([("PrefillPool", "p"), ("DecodePool", "d")]))
    spec = world.objects[kind, name]["spec"]
    # Another prefillRef is another set.
    *parents, last = data.draw(
        st.sampled_from([path for path in paths(spec) if path[0] != "prefillRef"])
    )
    node: Any = spec
    for step in parents:
        node = node[step]
    node[last] = data.draw(JUNK)
    world.reconcile()
    if kind == "DecodePool":
        assert len(world.of("other")) == 2
    assert set(world.status(name, kind)) >= {"conditions", "replicas", "selector"}


MISHAPS = ["nothing", "nothing", "ready", "ready", "unready", "fail", "gone", "orphaned"]


def mishap(world: World, name: str, what: str) -> None:
    pod = world.pods[name]
    if what == "gone":
        world.gone(name)
    elif what == "orphaned":
        world._change(name, owner=None)
    elif pod.active and what == "ready":
        world.make_ready(name)
    elif pod.active and what == "unready":
        world.make_unready(name)
    elif pod.active and what == "fail":
        world.fail(name)
