"""The arithmetic of a rollout, and a property test of whole rollouts with random failures."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_operator.observed import PodName, PodState
from tandem_operator.planning.rollout import (
    Gate,
    Limits,
    PodChanges,
    has_served,
    hold,
    index_of,
    limits,
    roll,
)
from tandem_operator.resources.spec import Rollout


def pod(
    name: str, *, ready: bool = True, available: bool | None = None, scheduled: bool = True
) -> PodState:
    """`pool-revision-index`; its compat hash is its revision. Ready means available by default."""
    revision = name.split("-")[1]
    return PodState(
        name=PodName(name), uid=name, pool="p", role="prefill", revision=revision,
        compat=revision, owner="u", phase="Running", ready=ready, scheduled=scheduled or ready,
        node="n", deleting=False, draining=False, created=0.0, address=None, labels={},
        available=ready if available is None else available,
    )  # fmt: skip


def pods(revision: str, *indexes: int, ready: bool = True) -> list[PodState]:
    return [pod(f"p-{revision}-{i}", ready=ready) for i in indexes]


def names(changes: PodChanges) -> list[str]:
    return [str(pod.name) for pod in changes.remove]


@pytest.mark.parametrize(
    ("surge", "unavailable", "desired", "expected"),
    [
        (None, None, 1, (1, 0)),
        (None, None, 4, (1, 1)),
        (None, None, 0, (0, 0)),
        (2, 0, 4, (2, 0)),
        ("50%", "10%", 5, (3, 0)),
        ("0%", "10%", 5, (0, 1)),
        (0, 9, 4, (0, 4)),
    ],
)
def test_limits(
    surge: int | str | None,
    unavailable: int | str | None,
    desired: int,
    expected: tuple[int, int],
) -> None:
    computed = limits(Rollout(max_surge=surge, max_unavailable=unavailable), desired)
    assert (computed.surge, computed.unavailable) == expected


@pytest.mark.parametrize(
    ("surge", "unavailable", "desired", "expected"),
    [
        (None, None, 1, (1, 0)),
        (None, None, 2, (0, 1)),
        (None, None, 8, (0, 2)),
        (None, 0, 4, (1, 0)),
        (1, None, 3, (1, 1)),
        (0, None, 1, (0, 1)),
        (None, None, 0, (0, 0)),
    ],
)
def test_limits_of_pods_with_accelerators(
    surge: int | None, unavailable: int | None, desired: int, expected: tuple[int, int]
) -> None:
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    computed = limits(rollout, desired, accelerators=1)
    assert (computed.surge, computed.unavailable) == expected


def test_a_first_rollout_creates_all_pods_at_once() -> None:
    assert roll([], Limits(3, 1, 0), None, "b") == PodChanges(add_update=3)


def test_with_surge_a_new_pod_is_ready_before_an_old_one_is_removed() -> None:
    within = Limits(2, 1, 0)
    assert roll(pods("a", 0, 1), within, "a", "b") == PodChanges(add_update=1)
    waiting = [*pods("a", 0, 1), *pods("b", 0, ready=False)]
    assert roll(waiting, within, "a", "b") == PodChanges()
    changes = roll([*pods("a", 0, 1), *pods("b", 0)], within, "a", "b")
    assert names(changes) == ["p-a-1"]
    assert changes.add_update == 1


def test_without_surge_an_old_pod_is_removed_first() -> None:
    changes = roll(pods("a", 0, 1), Limits(2, 0, 1), "a", "b")
    assert names(changes) == ["p-a-1"]
    assert changes.add_update == 1


def test_a_lost_old_pod_is_replaced_with_its_own_revision() -> None:
    changes = roll([*pods("a", 0), *pods("b", 0, ready=False)], Limits(2, 1, 0), "a", "b")
    assert changes == PodChanges(add_current=1)


def test_a_new_pod_that_is_ready_but_not_yet_available_replaces_no_old_one() -> None:
    waiting = [*pods("a", 0, 1), pod("p-b-0", available=False)]
    assert roll(waiting, Limits(2, 1, 0), "a", "b") == PodChanges()
    assert not has_served([pod("p-b-0", available=False)], Limits(1, 1, 0), "b")


def test_the_old_revision_comes_back_in_the_places_of_new_pods_that_fail() -> None:
    failing = [replace(pod(f"p-b-{i}", ready=False), trouble="crash") for i in (0, 1)]
    changes = roll([*pods("a", 0, 1), *failing], Limits(4, 0, 1), "a", "b")
    assert names(changes) == ["p-b-1"]
    assert (changes.add_current, changes.add_update) == (1, 0)


def test_a_lost_old_pod_is_replaced_even_when_it_was_the_only_one() -> None:
    assert roll(pods("b", 0, ready=False), Limits(1, 1, 0), "a", "b") == PodChanges(add_current=1)


def test_unready_pods_of_an_abandoned_revision_are_removed_at_once() -> None:
    changes = roll([*pods("a", 0), *pods("x", 0, ready=False)], Limits(1, 1, 0), "a", "b")
    assert names(changes) == ["p-x-0"]
    assert changes.add_update == 1


def test_a_first_revision_that_never_served_is_replaced_without_surge() -> None:
    changes = roll(pods("a", 0, 1, ready=False), Limits(2, 0, 1), None, "b")
    assert sorted(names(changes)) == ["p-a-0", "p-a-1"]
    assert changes.add_update == 2


def test_removal_order_is_unscheduled_then_unready_then_highest_index() -> None:
    crowd = [
        pod("p-b-0"), pod("p-b-1", ready=False), pod("p-b-2"), pod("p-b-10"),
        pod("p-b-4", ready=False, scheduled=False),
    ]  # fmt: skip
    order = [names(roll(crowd, Limits(n, 1, 0), "b", "b"))[-1] for n in (4, 3, 2, 1)]
    assert order == ["p-b-4", "p-b-1", "p-b-10", "p-b-2"]
    assert len(roll(crowd, Limits(0, 0, 0), "b", "b").remove) == 5


def test_a_closed_gate_removes_old_pods_only_for_a_first_new_one() -> None:
    closed = Gate(is_open=False)
    assert roll(pods("a", 0, 1), Limits(2, 1, 0), "a", "b", closed) == PodChanges(add_update=1)
    full = [*pods("a", 0, 1), *pods("b", 0)]
    assert roll(full, Limits(2, 1, 0), "a", "b", closed) == PodChanges()
    alone = roll(pods("a", 0), Limits(1, 0, 1), "a", "b", closed)
    assert (names(alone), alone.add_update) == (["p-a-0"], 1)


def test_a_scale_down_applies_behind_a_closed_gate() -> None:
    crowd = [*pods("a", 0, 1, 2, 3), *pods("b", 0, ready=False)]
    changes = roll(crowd, Limits(1, 1, 0), "a", "b", Gate(is_open=False))
    assert names(changes) == ["p-a-3", "p-a-2", "p-a-1"]


def test_a_pod_that_the_gate_keeps_is_not_removed() -> None:
    crowd = [*pods("a", 0), *pods("b", 0)]
    assert roll(crowd, Limits(1, 1, 0), "a", "b", Gate(keep={"p-a-0"})) == PodChanges()
    assert names(roll(crowd, Limits(1, 1, 0), "a", "b")) == ["p-a-0"]


def test_hold_scales_but_keeps_revisions() -> None:
    mixed = [*pods("a", 0, 1), *pods("b", 0)]
    assert hold(mixed, Limits(2, 1, 0), "a") == PodChanges()
    assert hold(mixed[:1], Limits(2, 1, 0), "a") == PodChanges(add_current=1)
    assert names(hold(pods("a", 0, 1), Limits(1, 1, 0), "a")) == ["p-a-1"]
    assert names(hold(mixed, Limits(1, 1, 0), "a")) == ["p-b-0"]
    assert hold([], Limits(2, 1, 0), None) == PodChanges()


def test_a_revision_has_served_once_enough_of_its_pods_are_ready() -> None:
    assert not has_served(pods("b", 0, ready=False), Limits(1, 1, 0), "b")
    assert not has_served([], Limits(1, 0, 1), "b")
    assert has_served(pods("b", 0, 1), Limits(3, 0, 1), "b")
    assert has_served([], Limits(0, 0, 0), "b")


@pytest.mark.parametrize(("name", "index"), [("p-abc-12", 12), ("p-abc-x", -1), ("p", -1)])
def test_index_of(name: str, index: int) -> None:
    assert index_of(replace(pod("p-a-0"), name=PodName(name))) == index


class Pool:
    """A pool driven by `roll` alone: added pods start unready, removed pods vanish at once."""

    def __init__(self, within: Limits, current: str) -> None:
        self.within, self.current = within, current
        self.pods: dict[str, PodState] = {}

    def roll(self, update: str) -> PodChanges:
        before = list(self.pods.values())
        ready = len([pod for pod in before if pod.ready])
        changes = roll(before, self.within, self.current, update)
        for removed in changes.remove:
            del self.pods[removed.name]
        for revision, number in ((self.current, changes.add_current), (update, changes.add_update)):
            for _ in range(number):
                name = next(n for i in range(99) if (n := f"p-{revision}-{i}") not in self.pods)
                self.pods[name] = pod(name, ready=False)
        ready_count = len([pod for pod in self.pods.values() if pod.ready])
        assert ready_count >= min(ready, self.within.fewest_ready), "took too many ready pods away"
        most = max(self.within.most, len(before))
        assert len(self.pods) <= most, "made too many pods"
        if has_served(list(self.pods.values()), self.within, update):
            self.current = update
        return changes


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    desired=st.integers(0, 5),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
)
def test_a_rollout_always_completes_within_its_limits(
    data: st.DataObject, desired: int, surge: int, unavailable: int
) -> None:
    within = limits(Rollout(max_surge=surge, max_unavailable=unavailable), desired)
    pool = Pool(within, "a")
    for pod in pods("a", *range(desired)):
        pool.pods[pod.name] = pod
    for _ in range(data.draw(st.integers(0, 12))):
        update = data.draw(st.sampled_from(["a", "b", "c"]))
        pool.roll(update)
        for name in sorted(pool.pods):
            fate = data.draw(
                st.sampled_from(["stay", "available", "ready", "unready", "failing", "lost"])
            )
            if fate == "lost":
                del pool.pods[name]
            elif fate != "stay":
                pool.pods[name] = replace(
                    pool.pods[name],
                    available=fate == "available",
                    ready=fate in ("available", "ready"),
                    trouble="crash" if fate == "failing" else None,
                )
    for _ in range(40):
        at_rest = pool.roll("b") == PodChanges() and all(
            pod.available for pod in pool.pods.values()
        )
        for name in pool.pods:
            pool.pods[name] = replace(pool.pods[name], ready=True, available=True, trouble=None)
        if at_rest:
            break
    assert sorted(pod.revision for pod in pool.pods.values()) == ["b"] * desired
    assert all(pod.ready for pod in pool.pods.values())
