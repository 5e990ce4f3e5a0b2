"""The server of the trials does what its fault says, and lists exactly that."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from benchmarks.load_server import Behaviour, Fault, Script, Served, Server, script

pytestmark = pytest.mark.component
TOKENS = 4


@asynccontextmanager
async def serving(fault: Fault, every: int = 2) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base URL is a server that sends its tokens at once."""
    behaviour = Behaviour(ttft=0, itl=0, fault=fault, every=every, stall_at=0, stall=0)
    runner = web.AppRunner(Server(behaviour).application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            yield session
    finally:
        await runner.cleanup()


async def ask(session: aiohttp.ClientSession, *, stream: bool = True) -> tuple[int, bytes]:
    """Status and body of an answer of four tokens."""
    body = {"model": "bench", "messages": [], "max_tokens": TOKENS, "stream": stream}
    async with session.post("/v1/chat/completions", json=body) as response:
        return response.status, await response.read()


def events(body: bytes) -> list[Any]:
    """The JSON of each event; `[DONE]` stays text."""
    data = [event.removeprefix("data: ") for event in body.decode().split("\n\n") if event]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


async def served(session: aiohttp.ClientSession) -> list[Served]:
    async with session.get("/served") as response:
        return msgspec.json.decode(await response.read(), type=list[Served])


async def test_a_good_stream_has_tokens_finish_reason_usage_and_done() -> None:
    async with serving(Fault.NONE) as session:
        _, body = await ask(session)
        *chunks, finish, usage, done = events(body)
        (record,) = await served(session)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [" word"] * TOKENS
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == TOKENS
    assert done == "[DONE]"
    assert record.ok
    assert len(record.tokens) == TOKENS
    assert record.arrived <= record.tokens[0] <= record.tokens[-1]


async def test_truncated_streams_end_cleanly_after_one_token_or_half_of_them() -> None:
    async with serving(Fault.TRUNCATES) as session:
        answers = [await ask(session) for _ in range(4)]
        records = await served(session)
    assert [status for status, _ in answers] == [200] * 4
    assert [len(events(body)) for _, body in answers[1::2]] == [1, TOKENS // 2]
    assert all(
        event["choices"][0]["finish_reason"] is None
        for _, body in answers[1::2]
        for event in events(body)
    )
    assert [record.ok for record in records] == [True, False, True, False]


async def test_an_in_band_error_comes_with_status_200() -> None:
    async with serving(Fault.IN_BAND_ERRORS) as session:
        await ask(session)
        status, body = await ask(session)
        records = await served(session)
    assert status == 200
    assert "error" in events(body)[-2]
    assert events(body)[-1] == "[DONE]"
    assert [record.ok for record in records] == [True, False]


async def test_a_cut_resets_the_connection_within_the_answer() -> None:
    async with serving(Fault.CUTS) as session:
        await ask(session)
        with pytest.raises(aiohttp.ClientError):
            await ask(session)
        records = await served(session)
    assert [record.ok for record in records] == [True, False]
    assert len(records[1].tokens) == TOKENS // 2


async def test_shed_requests_alternate_between_429_and_503() -> None:
    async with serving(Fault.SHEDS) as session:
        assert [(await ask(session))[0] for _ in range(4)] == [200, 429, 200, 503]
        assert [record.ok for record in await served(session)] == [True, False, True, False]


async def test_a_stall_loses_no_request() -> None:
    async with serving(Fault.STALLS) as session:
        assert [(await ask(session))[0] for _ in range(2)] == [200, 200]
        assert all(record.ok for record in await served(session))


@pytest.mark.parametrize("fault", [Fault.TRUNCATES, Fault.IN_BAND_ERRORS])
async def test_a_whole_answer_has_the_same_faults(fault: Fault) -> None:
    async with serving(fault) as session:
        bodies = [json.loads((await ask(session, stream=False))[1]) for _ in range(2)]
        records = await served(session)
    assert bodies[0]["choices"][0]["finish_reason"] == "length"
    assert bodies[0]["usage"]["completion_tokens"] == TOKENS
    assert "usage" not in bodies[1]
    assert ("error" in bodies[1]) == (fault is Fault.IN_BAND_ERRORS)
    assert [record.ok for record in records] == [True, False]


async def test_the_arrival_of_a_number_of_requests_can_be_awaited() -> None:
    async with serving(Fault.NONE) as session:
        await ask(session)
        async with session.get("/arrived/1") as response:
            assert response.status == 200


def test_the_first_request_is_always_answered_well() -> None:
    for fault in Fault:
        assert script(0, 16, Behaviour(0, 0, fault)) == Script(16)
