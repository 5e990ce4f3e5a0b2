"""The priority of a request, by the objective that it names."""

import pytest

from tandem_contract import headers as wire
from tandem_epp.request.objectives import Objective, Objectives, read_objective


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({}, 0),
        ({wire.OBJECTIVE: "batch"}, -10),
        ({wire.OBJECTIVE_OLDER: "premium"}, 10),
        ({wire.OBJECTIVE: "batch", wire.OBJECTIVE_OLDER: "premium"}, -10),
        ({wire.OBJECTIVE: "unknown", wire.OBJECTIVE_OLDER: "premium"}, 0),
        ({wire.OBJECTIVE: "", wire.OBJECTIVE_OLDER: "premium"}, 10),
    ],
)
def test_the_header_names_the_objective(headers: dict[str, str], priority: int) -> None:
    objectives = Objectives()
    assert objectives.priority(headers) == 0
    objectives.replace([Objective("batch", -10), Objective("premium", 10)])
    assert objectives.priority(headers) == priority
    objectives.replace([])
    assert objectives.priority(headers) == 0


def test_an_objective_without_a_priority_has_the_default() -> None:
    body = {"metadata": {"name": "a"}, "spec": {"poolRef": {"name": "p"}}}
    assert read_objective(body) == Objective("a", 0)
