"""Label selectors, evaluated here."""

from typing import Any

import pytest

from tandem_contract.selectors import matches


def expression(operator: str, *values: str, key: str = "tier") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        ({}, True),
        ({"matchLabels": {"app": "vllm", "tier": "a"}}, True),
        ({"matchLabels": {"app": "vllm", "zone": "z"}}, False),
        (expression("In", "b", "a"), True),
        (expression("In", "b"), False),
        (expression("In", "b", key="zone"), False),
        (expression("NotIn", "b"), True),
        (expression("NotIn", "a"), False),
        (expression("NotIn", "z", key="zone"), True),
        (expression("Exists"), True),
        (expression("Exists", key="zone"), False),
        (expression("DoesNotExist", key="zone"), True),
        (expression("DoesNotExist"), False),
        (expression("Near", "a"), False),
        ({"matchLabels": {"app": "vllm"}, **expression("In", "b")}, False),
    ],
)
def test_a_selector_holds_if_all_of_it_does(selector: dict[str, Any], is_match: bool) -> None:
    assert matches(selector, {"app": "vllm", "tier": "a"}) == is_match
