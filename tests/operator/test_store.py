from tandem_operator.runtime.store import Store


def store() -> Store[str, str]:
    return Store()


def test_a_value_is_found_under_each_of_its_keys() -> None:
    known = store()
    assert known.put("u", 1, ["a", "b"], "v") == {"a", "b"}
    assert known.of("a") == known.of("b") == ["v"]
    assert known.of("c") == []
    assert set(known.all_keys()) == {"a", "b"}


def test_only_a_newer_and_different_value_is_a_change() -> None:
    known = store()
    known.put("u", 5, ["a"], "v")
    assert known.put("u", 5, ["a"], "v") == set()
    assert known.put("u", 6, ["a"], "v") == set()
    assert known.put("u", 5, ["a"], "old") == set()
    assert known.of("a") == ["v"]
    assert known.put("u", 7, ["a"], "w") == {"a"}


def test_a_value_that_moves_is_a_change_for_both_keys() -> None:
    known = store()
    known.put("u", 1, ["a"], "v")
    assert known.put("u", 2, ["b"], "v") == {"a", "b"}
    assert known.of("a") == []
    assert known.all_keys() == ["b"]


def test_what_is_deleted_does_not_come_back_with_a_late_answer() -> None:
    known = store()
    known.put("u", 1, ["a"], "v")
    assert known.drop("u") == {"a"}
    assert known.put("u", 2, ["a"], "v") == set()
    assert known.drop("u") == set()
    assert len(known) == 0


def test_what_left_the_selector_comes_back_with_its_label_but_with_nothing_older() -> None:
    known = store()
    known.put("u", 1, ["a"], "v")
    assert known.drop("u", 5) == {"a"}
    assert known.put("u", 4, ["a"], "v") == set()
    assert known.put("u", 5, ["a"], "v") == set()
    assert known.put("u", 6, ["a"], "v") == {"a"}
    assert known.of("a") == ["v"]


def test_objects_of_one_name_are_told_apart() -> None:
    known = store()
    known.put("u", 1, ["a"], "v")
    known.put("w", 2, ["a"], "v")
    known.drop("u")
    assert known.of("a") == ["v"]
    assert known.uids() == {"w"}
