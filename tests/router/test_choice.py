"""Which backend serves each phase: roles, requests in flight, weights, and other scheduling."""

import asyncio
from collections import Counter

from ..sidecar.peers import FakePrefill, Turn
from .conftest import DECODE, PATH, PREFILL, PROMPT, Harness, until


async def fails(turn: Turn) -> None:
    turn.answer(500, b"{}")


def distinct(number: int) -> dict[str, object]:
    """A prompt that no other request has."""
    return {"model": "m", "prompt": [1000 + number] * 40}


async def test_a_short_prompt_is_split_too(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    response, _ = await harness.ask({"model": "m", "prompt": "Hi"})
    assert response.headers[PATH] == "prefill_then_decode"


async def test_each_phase_goes_to_the_backend_with_the_fewest_requests_in_flight(
    harness: Harness,
) -> None:
    prefill_may_answer, decode_may_answer = asyncio.Event(), asyncio.Event()

    async def prefill_waits(turn: Turn) -> None:
        await prefill_may_answer.wait()
        await FakePrefill.default(FakePrefill(), turn)

    async def decode_waits(turn: Turn) -> None:
        await decode_may_answer.wait()
        turn.answer(200, b'{"choices": []}')

    prefills = [await harness.prefill(f"p-{number}", prefill_waits) for number in range(2)]
    decodes = [await harness.decode(f"d-{number}", decode_waits) for number in range(2)]
    unhealthy = await harness.prefill("p-unhealthy"), await harness.decode("d-unhealthy")
    for peer in unhealthy:
        peer.metrics = fails
    await harness.start()
    asking = [asyncio.create_task(harness.ask(distinct(n))) for n in range(8)]
    # The engines' own counts: what arrived there and is not answered.
    await until(lambda: sum(len(peer.requests) for peer in prefills) == 8)
    assert [len(peer.requests) for peer in prefills] == [4, 4]
    prefill_may_answer.set()
    await until(lambda: sum(len(peer.requests) for peer in decodes) == 8)
    assert [len(peer.requests) for peer in decodes] == [4, 4]
    decode_may_answer.set()
    served = [response.headers for response, _ in await asyncio.gather(*asking)]
    assert Counter(headers[PREFILL] for headers in served) == {"p-0": 4, "p-1": 4}
    assert Counter(headers[DECODE] for headers in served) == {"d-0": 4, "d-1": 4}
    assert not any(peer.requests for peer in unhealthy)


async def test_a_weight_is_a_share_of_the_requests(harness: Harness) -> None:
    go = asyncio.Event()

    async def waits(turn: Turn) -> None:
        await go.wait()
        turn.answer(200, b'{"choices": []}')

    await harness.prefill("p")
    await harness.decode("large", waits, weight=3)
    await harness.decode("small", waits)
    await harness.start()
    asking = [asyncio.create_task(harness.ask(distinct(n))) for n in range(8)]
    fleet = harness.router.components.decisions.fleet
    await until(lambda: sum(pod.in_flight for pod in fleet if pod.name != "p") == 8)
    assert {pod.name: pod.in_flight for pod in fleet if pod.name != "p"} == {"large": 6, "small": 2}
    go.set()
    await asyncio.gather(*asking)


async def test_a_role_rules_the_other_phase_out(harness: Harness) -> None:
    prefill, decode = await harness.prefill("p"), await harness.decode("d")
    await harness.start()
    for number in range(3):
        await harness.ask(distinct(number))
    assert all(sent.json["max_tokens"] == 1 for sent in prefill.requests)
    assert all("remote_engine_id" in sent.json["kv_transfer_params"] for sent in decode.requests)


async def test_a_unified_backend_takes_part_in_both_phases(harness: Harness) -> None:
    await harness.unified("u-0")
    await harness.prefill("p")
    await harness.start()
    response, _ = await harness.ask()
    assert (response.headers[PREFILL], response.headers[DECODE]) == ("p", "u-0")


async def test_switched_off_one_backend_serves_each_request(harness: Harness) -> None:
    prefill, _ = await harness.prefill("p"), await harness.decode("d")
    await harness.start({"enabled": False})
    response, _ = await harness.ask()
    assert (response.headers[PATH], response.headers[DECODE]) == ("unified", "d")
    assert not prefill.requests


async def test_with_objectives_the_cost_chooses(harness: Harness) -> None:
    await harness.decode("d")
    await harness.start(slo={"m": {"ttft": "2s"}})
    decisions = harness.router.components.decisions
    assert decisions.picker.routing.scheduling.chooser is None
    assert decisions.fleet.objective("m").ttft == 2.0
    response, _ = await harness.ask({"model": "m", "prompt": PROMPT})
    assert response.status == 200


async def test_scheduling_of_the_file_takes_the_place_of_the_default(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start(plugins=[{"type": "predicted-cost"}])
    assert harness.router.components.decisions.picker.routing.scheduling.chooser is None
    response, _ = await harness.ask({"model": "m", "prompt": PROMPT})
    assert response.status == 200
