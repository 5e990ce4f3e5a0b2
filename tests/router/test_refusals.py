"""Refused generations count as orchestration errors, and say path and request id."""

from typing import Any

import pytest

from .conftest import PATH, Harness

COUNT = 'disaggregated_errors_total{phase="orchestration"}'


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"model": "unknown", "prompt": "p"}, {}, 404),
        ({"model": 7, "prompt": "p"}, {}, 400),
        ([], {}, 400),
        ({"model": "m", "prompt": "p"}, {"content-encoding": "gzip"}, 415),
    ],
)
async def test_refusals_of_generations(
    harness: Harness, body: Any, headers: dict[str, str], status: int
) -> None:
    engine = await harness.decode("d-0", role="unified", models=["m"])
    await harness.start()
    ids = headers | {"x-request-id": "r-1"}
    async with harness.http.post(harness.url(), json=body, headers=ids) as answer:
        assert (answer.status, answer.headers[PATH]) == (status, "unified")
        assert answer.headers["x-request-id"] == "r-1"
    assert await harness.metric(COUNT) == 1
    assert engine.requests == []


async def test_a_refusal_without_a_pod_names_the_id_of_its_decision(harness: Harness) -> None:
    engine = await harness.decode("d-0", role="unified", models=["m"])
    await harness.start()
    response, _ = await harness.ask({"model": "unknown", "prompt": "p"})
    request_id = response.headers["x-request-id"]
    assert f'"{request_id}"' in await harness.page(f"/debug/decisions?request_id={request_id}")
    assert engine.requests == []
