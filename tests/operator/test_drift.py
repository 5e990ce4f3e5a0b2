"""Whether an object is up to date: neither a write too many nor one too few."""

from typing import Any

import pytest

from tandem_operator.planning.drift import is_up_to_date, quantity


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        pytest.param({"a": 1, "status": {}}, {"a": 1}, id="more fields than desired"),
        pytest.param({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, id="defaults in a list's item"),
        pytest.param({}, {"a": None, "b": {}, "c": [], "d": ""}, id="empty is absent"),
        pytest.param({"a": {}}, {"a": {"b": {}}}, id="empty inside empty"),
        pytest.param({}, {"a": {"b": {"c": None}}}, id="deeply empty is absent"),
        pytest.param({"a": 0}, {"a": 0}, id="zero"),
        pytest.param(
            {"limits": {"cpu": "1", "memory": "1Gi"}},
            {"limits": {"cpu": "1000m", "memory": "1024Mi"}},
            id="quantities",
        ),
        pytest.param({"limits": {"cpu": "2"}}, {"limits": {"cpu": 2}}, id="a quantity as a number"),
        pytest.param(
            {"selector": {"matchLabels": {"a": "b"}}},
            {"selector": {"matchLabels": {"a": "b"}}},
            id="selector",
        ),
    ],
)
def test_objects_that_are_up_to_date(live: dict[str, Any], desired: dict[str, Any]) -> None:
    assert is_up_to_date(live, desired)


@pytest.mark.parametrize(
    ("live", "desired"),
    [
        pytest.param({"a": 1}, {"a": 2}, id="another value"),
        pytest.param({}, {"a": 1}, id="absent"),
        pytest.param({}, {"a": 0}, id="zero is not absent"),
        pytest.param({}, {"a": False}, id="false is not absent"),
        pytest.param({"a": 1}, {"a": True}, id="true is not 1"),
        pytest.param({"a": "x"}, {"a": {"b": 1}}, id="another type"),
        pytest.param({"a": [1, 2]}, {"a": [2, 1]}, id="another order"),
        pytest.param({"a": [1, 2]}, {"a": [1]}, id="an item too many"),
        pytest.param({"a": [1]}, {"a": []}, id="a list to be emptied"),
        pytest.param({"data": {"a": "1", "b": "2"}}, {"data": {"a": "1"}}, id="a key too many"),
        pytest.param({"selector": {"a": "1", "b": "2"}}, {"selector": {"a": "1"}}, id="selector"),
        pytest.param({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1001m"}}, id="quantity"),
        pytest.param({"limits": {"cpu": "1", "b": "1"}}, {"limits": {"cpu": "1"}}, id="limit less"),
        pytest.param({"name": "1Gi"}, {"name": "1024Mi"}, id="no quantity elsewhere"),
    ],
)
def test_objects_that_have_drifted(live: dict[str, Any], desired: dict[str, Any]) -> None:
    assert not is_up_to_date(live, desired)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("100m", "0.1"), ("1Gi", "1073741824"), ("1e3", "1000"), (".5", "0.5"), ("2.", "2"), (3, "3")],
)
def test_quantities_are_numbers(text: object, amount: str) -> None:
    assert str(float(quantity(text) or 0)) == str(float(amount))


@pytest.mark.parametrize("text", ["", "much", "1.2.3", "1Gib", None])
def test_text_that_is_no_quantity_gives_none(text: object) -> None:
    assert quantity(text) is None
