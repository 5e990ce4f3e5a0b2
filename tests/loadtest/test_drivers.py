"""Drivers: open loop and conversations."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tandem_loadtest.calls import Call, Result
from tandem_loadtest.client import Client, ClientSettings
from tandem_loadtest.drivers import Timed, converse, run_open_loop
from tandem_loadtest.workload.conversations import Script, Step

from .servers import Gate, answering, serving


def timed(*times: float) -> list[Timed]:
    return [Timed(at, Call("x", max_tokens=i + 1, stream=False)) for i, at in enumerate(times)]


async def test_open_loop_does_not_wait_for_answers() -> None:
    gate = Gate()
    reported: list[Result] = []
    async with serving(gate.handle) as url, Client(ClientSettings(url=url, model="tiny")) as client:
        run = asyncio.create_task(
            run_open_loop(client.send, timed(0.02, 0, 0.01), on_result=reported.append)
        )
        await gate.holds(3)
        gate.open.set()
        results = await run
    assert [r.call.max_tokens for r in results] == [1, 2, 3]
    assert all(r.ok for r in results)
    assert sorted(r.call.max_tokens for r in reported) == [1, 2, 3]


async def test_requests_go_out_in_order_of_time() -> None:
    order: list[int] = []

    async def send(call: Call) -> Result:
        order.append(call.max_tokens)
        return Result(call)

    await run_open_loop(send, timed(0.02, 0, 0.01))
    assert order == [2, 3, 1]


async def test_beyond_max_in_flight_a_request_fails_and_is_not_delayed() -> None:
    gate = Gate()
    reported: list[Result] = []
    async with serving(gate.handle) as url, Client(ClientSettings(url=url, model="tiny")) as client:

        def watch(result: Result) -> None:
            reported.append(result)
            # The first report is that of the request that was not sent.
            gate.open.set()

        results = await run_open_loop(client.send, timed(0, 0, 0), max_in_flight=2, on_result=watch)
    assert [r.ok for r in results] == [True, True, False]
    assert results[2].error == "not sent: 2 requests were in flight already"
    assert [r.ok for r in reported] == [False, True, True]


async def test_cancelling_a_run_closes_its_connections() -> None:
    gate = Gate()
    async with serving(gate.handle) as url, Client(ClientSettings(url=url, model="tiny")) as client:
        run = asyncio.create_task(run_open_loop(client.send, timed(0, 3600)))
        await gate.holds(1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await gate.left.wait()


async def test_a_run_without_calls_has_no_results() -> None:
    async with Client(ClientSettings(url="http://127.0.0.1:1", model="tiny")) as client:
        assert await run_open_loop(client.send, []) == []


SCRIPT = Script(
    name="s",
    document="doc",
    questions=("q0", "q1"),
    steps=(Step(0, False), Step(1, False), Step(1, False)),
    chat=True,
    max_tokens=2,
)


async def test_a_conversation_carries_the_answers() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((await request.json())["messages"])
        answer = {"message": {"content": f"a{len(bodies)}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [answer]})

    reported: list[Result] = []
    async with serving(handler) as url, Client(ClientSettings(url=url, model="tiny")) as client:
        results = await converse(client.send, SCRIPT, on_result=reported.append)
    assert reported == results
    assert [r.answer.text for r in results] == ["a1", "a2", "a3"]
    assert [m["content"] for m in bodies[1]] == ["doc", "q0", "a1", "q1"]
    assert bodies[2] == bodies[1]


async def test_a_conversation_ends_where_a_step_fails() -> None:
    async with (
        serving(answering({}, status=500)) as url,
        Client(ClientSettings(url=url, model="tiny")) as client,
    ):
        results = await converse(client.send, SCRIPT)
    assert [r.status for r in results] == [500]
