"""The priority of a request, by the objective that it names."""

import pytest

from tandem_contract import headers as wire
from tandem_contract.config import FlowClient
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


@pytest.mark.parametrize(
    ("headers", "priority", "tenant"),
    [
        ({wire.FAIRNESS: "a", wire.FAIRNESS_OLDER: "b"}, 0, "a"),
        ({wire.FAIRNESS_OLDER: "b"}, 0, "b"),
        ({}, 0, ""),
        # With an API key its own headers do not count.
        ({wire.CLIENT: "web", wire.OBJECTIVE: "batch", wire.FAIRNESS: "a"}, 5, "web"),
        ({wire.CLIENT: "ci", wire.OBJECTIVE_OLDER: "premium", wire.FAIRNESS_OLDER: "a"}, -1, "qa"),
        ({wire.CLIENT: "new", wire.OBJECTIVE: "premium", wire.FAIRNESS: "a"}, 0, "new"),
    ],
)
def test_settings_of_api_keys_come_before_headers(
    headers: dict[str, str], priority: int, tenant: str
) -> None:
    objectives = Objectives()
    objectives.replace([Objective("batch", -10), Objective("premium", 10)])
    clients = (FlowClient("web", 5), FlowClient("ci", -1, "qa"))
    objectives.clients = {client.name: client for client in clients}
    assert (objectives.priority(headers), objectives.tenant(headers)) == (priority, tenant)


def test_an_objective_without_a_priority_has_the_default() -> None:
    body = {"metadata": {"name": "a"}, "spec": {"poolRef": {"name": "p"}}}
    assert read_objective(body) == Objective("a", 0)
