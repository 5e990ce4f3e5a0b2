"""Warm-ups: each pair of backends hands off once before a client needs it; no client sees it."""

import asyncio
import os
import socket

import pytest

from tandem_router import warmups
from tandem_router.configuration import load

from ..sidecar.peers import Turn
from .conftest import PREFILL, Harness

WARM = 'tandem_epp_warmups_total{result="warm"}'


async def wait_for(harness: Harness, sample: str, value: float) -> None:
    async with asyncio.timeout(20):
        # A warm-up that failed is tried again: the figure may have passed the value.
        while await harness.metric(sample) < value:
            await asyncio.sleep(0.02)


async def test_each_pair_hands_off_once_and_no_request_is_counted(harness: Harness) -> None:
    prefills = [await harness.prefill(f"p-{n}") for n in range(2)]
    decodes = [await harness.decode(f"d-{n}", models=["m"]) for n in range(2)]
    await harness.start(warm_up=True)
    await wait_for(harness, WARM, 4)
    for prefill in prefills:
        assert len(prefill.requests) == 2
    for decode in decodes:
        for request in decode.requests:
            assert request.headers["host"] == str(decode.address)
            assert request.json["model"] == "m"
            assert request.json["max_tokens"] == 1
            assert request.json["kv_transfer_params"]["remote_engine_id"] == "engine-p"
        assert len(decode.requests) == 2
    assert await harness.metric("disaggregated_requests_total") == 0
    assert await harness.metric("tandem_epp_decisions_total") == 0
    response, _ = await harness.ask()
    assert response.headers[PREFILL] in {"p-0", "p-1"}
    assert await harness.metric(WARM) == 4


async def test_a_backend_that_a_reload_adds_is_warmed(harness: Harness) -> None:
    await harness.prefill("p-0")
    await harness.decode("d")
    await harness.start(warm_up=True)
    await wait_for(harness, WARM, 1)
    added = await harness.prefill("p-1")
    harness.write()
    harness.router.components.apply(load(harness.file, os.environ))
    await wait_for(harness, WARM, 2)
    assert len(added.requests) == 1


async def test_nothing_is_warmed_where_nothing_is_split(harness: Harness) -> None:
    prefill, decode = await harness.prefill("p"), await harness.decode("d")
    await harness.start({"enabled": False}, warm_up=True)
    await harness.ask()
    assert await harness.metric("tandem_epp_warmups_total") == 0
    assert not harness.router.components.decisions.warm_ups._tasks
    assert not prefill.requests
    assert len(decode.requests) == 1


async def test_a_warm_up_that_fails_delays_no_request(harness: Harness) -> None:
    async def refuses_warm_ups(turn: Turn) -> None:
        if len(turn.request.json["prompt"]) != 5:
            turn.answer(400, b'{"error": {"message": "no"}}')
        else:
            await decode.complete(turn)

    await harness.prefill("p")
    decode = await harness.decode("d", refuses_warm_ups)
    await harness.start(warm_up=True)
    response, _ = await harness.ask({"model": "m", "prompt": [1] * 5})
    assert response.status == 200
    await wait_for(harness, 'tandem_epp_warmups_total{result="error"}', 1)


async def test_a_drain_waits_for_a_warm_up_and_begins_no_other(harness: Harness) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def waits(turn: Turn) -> None:
        asked.set()
        await go.wait()
        turn.answer(503, b"{}")

    prefill = await harness.prefill("p", waits)
    await harness.decode("d")
    await harness.start({"fallback_to_unified": False}, warm_up=True)
    await asyncio.wait_for(asked.wait(), 20)
    components = harness.router.components
    components.lifecycle.drain()
    assert components.lifecycle.work
    go.set()
    async with asyncio.timeout(20):
        await components.lifecycle.idle()
    pair = [next(pod for pod in components.decisions.fleet if pod.name == name) for name in "dp"]
    assert await components.decisions.warm_ups.hand_offs.hand_off(*pair) == "unreachable"
    assert len(prefill.requests) == 1


@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_warm_up_that_is_cancelled_early_leaves_no_socket(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """`turns`: of the event loop, after which it is cancelled."""
    ends: list[socket.socket] = []

    def pair() -> tuple[socket.socket, ...]:
        ends.extend(make_pair())
        return tuple(ends)

    make_pair = socket.socketpair
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    components = harness.router.components
    fleet = components.decisions.fleet
    prefill, decode = map(fleet.find, ("p", "d"))
    hand_offs = components.decisions.warm_ups.hand_offs
    monkeypatch.setattr(warmups.socket, "socketpair", pair)
    task = asyncio.create_task(hand_offs.hand_off(decode, prefill))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(20):
        while any(end.fileno() >= 0 for end in ends):
            await asyncio.sleep(0.01)
    assert len(ends) == 2
