"""Refused generations count as orchestration errors, and say path and request id."""

from io import BytesIO
from typing import Any

import msgspec
import pytest

from tandem_contract.prompt_length import ANY_VOCABULARY

from ..sidecar.peers import Turn
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


LENGTH = 8192
LONG = msgspec.json.encode({"model": "m", "prompt": "x" * (LENGTH * ANY_VOCABULARY.longest + 1)})


async def test_a_text_that_cannot_fit_reaches_no_engine(harness: Harness) -> None:
    engine = await harness.decode("d-0", role="unified", credentials={"api_key": "key"})
    engine.models = lists_models
    await harness.start()
    sent = {"content-type": "application/json"}
    async with harness.http.post(harness.url(), data=BytesIO(LONG), headers=sent) as answer:
        assert (answer.status, answer.headers[PATH]) == (400, "unified")
        message = (await answer.json())["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {LENGTH} tokens. However,")
    assert engine.requests == []
    assert await harness.metric(COUNT) == 1


async def lists_models(turn: Turn) -> None:
    """Answer as an engine that lists its model's length to those who have its key."""
    has_key = turn.request.headers.get("authorization") == "Bearer key"
    models = b'{"data": [{"id": "m", "max_model_len": %d}]}' % LENGTH
    turn.answer(200 if has_key else 401, models if has_key else b"{}")
