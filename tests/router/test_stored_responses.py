"""Requests about a stored response go to the backend whose engine stores it."""

import json
from typing import Any

import pytest

from ..sidecar.peers import FakeResponses, Turn
from .conftest import DECODE, Harness

PATH = "/v1/responses"
CREATE: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": 4}


async def start(harness: Harness, role: str = "decode") -> list[FakeResponses]:
    engines = [FakeResponses() for _ in range(3)]
    for number, engine in enumerate(engines):
        await harness.add(f"d-{number}", engine, role=role)
    await harness.prefill("p")
    await harness.start()
    return engines


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["decode", "unified"])
async def test_follow_ups_find_their_response(harness: Harness, role: str, stream: bool) -> None:
    engines = await start(harness, role)
    for number in range(6):
        _, body = await harness.ask(CREATE | {"input": str(number), "stream": stream}, PATH)
        holder, response_id = next((e, i) for e in engines for i in e.stored if i in body.decode())
        follow_up = CREATE | {"previous_response_id": response_id}
        for _ in range(3):
            answer, _ = await harness.ask(follow_up, PATH)
            assert (answer.status, answer.headers["x-continuum-routing-path"]) == (200, "unified")
            async with harness.http.get(harness.url(f"{PATH}/{response_id}")) as got:
                assert (got.status, (await got.json())["id"]) == (200, response_id)
        async with harness.http.post(harness.url(f"{PATH}/{response_id}/cancel")) as cancelled:
            assert await cancelled.json() == {"cancelled": True}
        async with harness.http.delete(harness.url(f"{PATH}/{response_id}")) as deleted:
            assert deleted.status == 200
        assert response_id not in holder.stored
        assert (await harness.ask(follow_up, PATH))[0].status == 404


async def test_what_is_not_stored_and_what_is_unknown_gets_the_engines_404(
    harness: Harness,
) -> None:
    engines = await start(harness)
    _, body = await harness.ask(CREATE | {"store": False}, PATH)
    assert not any(engine.stored for engine in engines)
    for response_id in (json.loads(body)["id"], "resp_unknown"):
        answer, error = await harness.ask(CREATE | {"previous_response_id": response_id}, PATH)
        assert answer.status == 404
        assert f"Response with id '{response_id}' not found.".encode() in error


async def test_a_failure_of_the_holder_is_no_404_of_another_backend(harness: Harness) -> None:
    engines = await start(harness)
    answer, body = await harness.ask(CREATE, PATH)
    (holder,) = [engine for engine in engines if engine.stored]

    async def errs(turn: Turn) -> None:
        turn.answer(500, b"{}")

    holder.generate = errs
    response_id = json.loads(body)["id"]
    failed, _ = await harness.ask(CREATE | {"previous_response_id": response_id}, PATH)
    assert (failed.status, failed.headers[DECODE]) == (500, answer.headers[DECODE])
    async with harness.http.get(harness.url(f"{PATH}/{response_id}")) as got:
        assert got.status == 500
