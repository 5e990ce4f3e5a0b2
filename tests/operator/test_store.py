import math
from collections.abc import Iterable

from tandem_operator.runtime.store import Store, WatchScope

SCOPE = WatchScope("v1", "Pod", "n")


def store() -> Store[str, str]:
    return Store()


def put(
    pods: Store[str, str],
    uid: str,
    version: int,
    keys: Iterable[str],
    value: str,
    listed_at: int | None = None,
    scope: WatchScope = SCOPE,
) -> set[str]:
    return pods.put(uid, version, keys, value, scope=scope, listed_at=listed_at)


def test_a_value_is_found_under_each_of_its_keys() -> None:
    pods = store()
    assert put(pods, "u", 1, ["a", "b"], "v") == {"a", "b"}
    assert pods.by_key("a") == pods.by_key("b") == ["v"]
    assert pods.by_key("c") == []
    assert set(pods.all_keys()) == {"a", "b"}


def test_only_a_newer_and_different_value_is_a_change() -> None:
    pods = store()
    put(pods, "u", 5, ["a"], "v")
    assert put(pods, "u", 5, ["a"], "v") == set()
    assert put(pods, "u", 6, ["a"], "v") == set()
    assert put(pods, "u", 5, ["a"], "old") == set()
    assert pods.by_key("a") == ["v"]
    assert put(pods, "u", 7, ["a"], "w") == {"a"}


def test_a_value_that_moves_affects_both_keys() -> None:
    pods = store()
    put(pods, "u", 1, ["a"], "v")
    assert put(pods, "u", 2, ["b"], "v") == {"a", "b"}
    assert pods.by_key("a") == []
    assert pods.all_keys() == ["b"]


def test_a_late_answer_does_not_restore_a_deleted_object() -> None:
    pods = store()
    put(pods, "u", 1, ["a"], "v")
    assert pods.remove("u") == {"a"}
    assert put(pods, "u", 2, ["a"], "v") == set()
    assert pods.remove("u") == set()
    assert len(pods) == 0


def test_only_a_newer_version_restores_an_object_that_left_the_selector() -> None:
    pods = store()
    put(pods, "u", 1, ["a"], "v")
    assert pods.remove("u", 5) == {"a"}
    assert put(pods, "u", 4, ["a"], "v") == set()
    assert put(pods, "u", 5, ["a"], "v") == set()
    assert put(pods, "u", 6, ["a"], "v") == {"a"}
    assert pods.by_key("a") == ["v"]


def test_objects_are_identified_by_uid() -> None:
    pods = store()
    put(pods, "u", 1, ["a"], "v")
    put(pods, "w", 2, ["a"], "v")
    pods.remove("u")
    assert pods.by_key("a") == ["v"]
    assert pods.uids_in(SCOPE, 2) == {"w"}


def test_a_list_replaces_newer_versions_that_are_older_than_the_list() -> None:
    pods = store()
    put(pods, "u", 50, ["a"], "v")
    assert put(pods, "u", 10, ["a"], "restored", listed_at=100) == {"a"}
    assert pods.by_key("a") == ["restored"]
    put(pods, "u", 120, ["a"], "answer")
    assert put(pods, "u", 10, ["a"], "restored", listed_at=110) == set()
    assert pods.by_key("a") == ["answer"]


def test_a_list_brings_back_what_was_deleted_before_it() -> None:
    pods = store()
    put(pods, "u", 1, ["a"], "v")
    pods.remove("u", 200)
    assert put(pods, "u", 10, ["a"], "v", listed_at=100) == set()
    assert put(pods, "u", 10, ["a"], "v", listed_at=300) == {"a"}
    pods.remove("u", math.inf)
    assert put(pods, "u", 10, ["a"], "v", listed_at=300) == {"a"}


def test_a_scope_has_the_objects_of_its_kind_and_namespace() -> None:
    pods, elsewhere = store(), WatchScope("v1", "Pod", "m")
    put(pods, "u", 5, ["a"], "v")
    put(pods, "w", 5, ["a"], "v", scope=elsewhere)
    put(pods, "x", 5, ["a"], "v", scope=WatchScope("v1", "Service", "n"))
    assert pods.uids_in(SCOPE, 5) == {"u"}
    assert pods.uids_in(SCOPE, 4) == set()
    assert pods.uids_in(WatchScope("v1", "Pod", None), 5) == {"u", "w"}
    pods.remove("gone", 7)
    pods.forget(SCOPE)
    assert len(pods) == 2
    assert put(pods, "gone", 3, ["a"], "v") == {"a"}
