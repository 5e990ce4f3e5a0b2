"""A text that cannot fit the model's length reaches no engine."""

import asyncio
import json
from io import BytesIO
from typing import Any

import pytest

from tandem_contract.prompt_length import LONGEST_TOKEN

from ..conftest import Harness
from ..peers import FakeDecode, Turn, hangs

LENGTH = 8192
LIMIT = LENGTH * LONGEST_TOKEN
LISTED = [{"id": "m", "max_model_len": LENGTH}, {"id": "adapter", "parent": "m"}]
PATH = "X-Continuum-Routing-Path"


def body(characters: int, **members: Any) -> BytesIO:
    return BytesIO(json.dumps({"model": "m", "prompt": "x" * characters} | members).encode())


def chat(characters: int, path: str) -> BytesIO:
    turn = {"role": "user", "content": "x" * characters}
    member = "input" if path == "/v1/responses" else "messages"
    return body(0, **{member: [turn]})


async def lists(turn: Turn) -> None:
    """Answer as an engine with the models of `LISTED`."""
    if turn.request.method == "GET":
        turn.answer(200, json.dumps({"object": "list", "data": LISTED}).encode())
    else:
        turn.answer(200, b"{}")


def posts(engine: FakeDecode) -> int:
    return sum(request.method == "POST" for request in engine.requests)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
async def test_a_text_that_cannot_fit_is_refused(harness: Harness, path: str) -> None:
    prefill = await harness.prefill()
    await harness.start(lists)
    completion = path == "/v1/completions"
    data = body(LIMIT + 1) if completion else chat(LIMIT + 1, path)
    headers = harness.candidates | {"x-request-id": "r-1", "authorization": "Bearer key"}
    async with harness.http.post(harness.url(path), data=data, headers=headers) as answer:
        assert (answer.status, answer.headers["x-request-id"]) == (400, "r-1")
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-0"
        message = (await answer.json())["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {LENGTH} tokens. However,")
    assert (posts(harness.decode), prefill.requests) == (0, [])
    [asked] = harness.decode.requests
    assert (asked.target, asked.headers["authorization"]) == ("/v1/models", "Bearer key")
    assert await harness.metric('disaggregated_errors_total{phase="orchestration"}') == 1
    assert not harness.sidecar.lifecycle.work


@pytest.mark.parametrize(
    ("characters", "members"),
    [
        (LIMIT, {}),
        (LIMIT + 1, {"model": "adapter"}),
        (LIMIT + 1, {"model": "unknown"}),
        (LIMIT + 1, {"model": None}),
        (LIMIT + 1, {"truncate_prompt_tokens": 5}),
    ],
)
async def test_what_an_engine_may_accept_reaches_it(
    harness: Harness, characters: int, members: dict[str, Any]
) -> None:
    prefill = await harness.prefill()
    await harness.start(lists)
    data = body(characters, **members)
    headers = harness.candidates
    async with harness.http.post(harness.url(), data=data, headers=headers) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")
    assert (posts(harness.decode), len(prefill.requests)) == (1, 1)


async def no_list(turn: Turn) -> None:
    turn.answer(401 if turn.request.method == "GET" else 200, b"{}")


async def other_list(turn: Turn) -> None:
    turn.answer(200, b'{"data": "m"}')


async def late_list(turn: Turn) -> None:
    await (hangs if turn.request.method == "GET" else lists)(turn)


@pytest.mark.parametrize("script", [no_list, other_list, late_list])
async def test_an_engine_without_a_list_decides_itself(harness: Harness, script: Any) -> None:
    await harness.start(script)
    async with harness.http.post(harness.url(), data=body(LIMIT + 1)) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "unified")
    assert posts(harness.decode) == 1


async def test_a_client_that_leaves_meanwhile(harness: Harness) -> None:
    await harness.start(late_list)
    asking = asyncio.create_task(harness.http.post(harness.url(), data=body(LIMIT + 1)))
    await harness.decode.received(1)
    asking.cancel()
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert posts(harness.decode) == 0


async def test_a_drain_that_expires_meanwhile(harness: Harness) -> None:
    await harness.start(late_list, drain_timeout=0.0)
    asking = asyncio.create_task(harness.http.post(harness.url(), data=body(LIMIT + 1)))
    await harness.decode.received(1)
    harness.sidecar.lifecycle.drain()
    async with await asking as answer:
        assert answer.status == 503
    assert posts(harness.decode) == 0
