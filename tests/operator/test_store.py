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


def test_a_value_that_moves_is_a_change_for_both_keys() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.put("u", 2, ["b"], "v") == {"a", "b"}
    assert pods.by_key("a") == []
    assert pods.all_keys() == ["b"]


def test_what_is_deleted_does_not_come_back_with_a_late_answer() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.remove("u") == {"a"}
    assert pods.put("u", 2, ["a"], "v") == set()
    assert pods.remove("u") == set()
    assert len(pods) == 0


def test_what_left_the_selector_comes_back_with_its_label_but_with_nothing_older() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    assert pods.remove("u", 5) == {"a"}
    assert pods.put("u", 4, ["a"], "v") == set()
    assert pods.put("u", 5, ["a"], "v") == set()
    assert pods.put("u", 6, ["a"], "v") == {"a"}
    assert pods.by_key("a") == ["v"]


def test_objects_of_one_name_are_told_apart() -> None:
    pods = store()
    pods.put("u", 1, ["a"], "v")
    pods.put("w", 2, ["a"], "v")
    pods.remove("u")
    assert pods.by_key("a") == ["v"]
    assert pods.uids() == {"w"}
