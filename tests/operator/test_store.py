from tandem_operator.runtime.store import Store


def store() -> Store[str, str]:
    return Store()


def test_a_value_is_found_under_each_of_its_keys() -> None:
    pods = store()
    assert pods.put("u", 1, ["a", "b"], "v") == {"a", "b"}
    assert pods.by_key("a") == pods.by_key("b") == ["v"]
    assert pods.by_key("c") == []
    assert set(pods.all_keys()) == {"a", "b"}


def test_only_a_newer_and_different_value_is_a_change() -> None:
    pods = store()
    pods.put("u", 5, ["a"], "v")
    assert pods.put("u", 5, ["a"], "v") == set()
    assert pods.put("u", 6, ["a"], "v") == set()
    assert pods.put("u", 5, ["a"], "old") == set()
    assert pods.by_key("a") == ["v"]
    assert pods.put("u", 7, ["a"], "w") == {"a"}


def test_a_value_that_moves_affects_both_keys() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.put("u", 2, ["b"], "v") == {"a", "b"}
    assert pods.by_key("a") == []
    assert pods.all_keys() == ["b"]


def test_a_late_answer_does_not_restore_a_deleted_object() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.remove("u") == {"a"}
    assert pods.put("u", 2, ["a"], "v") == set()
    assert pods.remove("u") == set()
    assert len(pods) == 0


def test_only_a_newer_version_restores_an_object_that_left_the_selector() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.remove("u", 5) == {"a"}
    assert pods.put("u", 4, ["a"], "v") == set()
    assert pods.put("u", 5, ["a"], "v") == set()
    assert pods.put("u", 6, ["a"], "v") == {"a"}
    assert pods.by_key("a") == ["v"]


def test_objects_are_identified_by_uid() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    pods.put("w", 2, ["a"], "v")
    pods.remove("u")
    assert pods.by_key("a") == ["v"]
    assert pods.uids() == {"w"}
