"""A text that cannot fit the model's length reaches no engine."""

import asyncio
import json
from io import BytesIO
from typing import Any

import pytest

from tandem_contract.prompt_length import ANY_VOCABULARY

from ..conftest import Harness
from ..peers import Turn

LENGTH = 8192
LONG = "x" * (LENGTH * ANY_VOCABULARY.longest + 1)
TURN = {"role": "user", "content": LONG}


async def lists(turn: Turn) -> None:
    turn.answer(200, b'{"data": [{"id": "m", "max_model_len": %d}]}' % LENGTH)


async def start(harness: Harness) -> None:
    """Start it with an engine that lists its model's length, and wait until that is known."""
    await harness.start(models=lists)
    health = harness.sidecar.health
    async with asyncio.timeout(20):
        while health.max_model_len is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [TURN]}),
        ("/v1/responses", {"input": [TURN]}),
        ("/v1/messages", {"messages": [TURN]}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused(
    harness: Harness, path: str, members: dict[str, Any]
) -> None:
    prefill = await harness.prefill()
    await start(harness)
    data = BytesIO(json.dumps({"model": "any", **members}).encode())
    headers = harness.candidates | {"x-request-id": "r-1"}
    async with harness.http.post(harness.url(path), data=data, headers=headers) as answer:
        assert (answer.status, answer.headers["x-request-id"]) == (400, "r-1")
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-0"
        message = (await answer.json())["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {LENGTH} tokens. However,")
    assert harness.decode.requests == prefill.requests == []
    assert await harness.metric('disaggregated_errors_total{phase="orchestration"}') == 1


async def test_a_length_given_by_flag_bounds_an_engine_that_lists_none(harness: Harness) -> None:
    await harness.start(max_model_len=LENGTH)
    data = BytesIO(json.dumps({"model": "m", "prompt": LONG}).encode())
    async with harness.http.post(harness.url(), data=data) as answer:
        assert answer.status == 400
    assert harness.decode.requests == []


async def test_an_engine_of_which_no_length_is_known_decides_itself(harness: Harness) -> None:
    await harness.start()
    data = BytesIO(json.dumps({"model": "m", "prompt": LONG}).encode())
    async with harness.http.post(harness.url(), data=data) as answer:
        assert answer.status == 200
    assert len(harness.decode.requests) == 1
