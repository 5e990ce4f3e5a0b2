"""Engines die or hang during hand-offs; clients still get the right response."""

import asyncio
import random
import signal
from typing import Any

import aiohttp
import pytest

from tandem_contract import headers, metrics
from tandem_contract.paths import RoutingPath

from ..sidecar.processes import sidecar
from .api_requests import DONE, KINDS, Answer, ask
from .engines import STARTS_WITHIN
from .pairs import Moved, Pair, in_phase, stopped, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKED = KINDS["completions"]
LOAD = 1000
"""Number of requests while the prefill engine is killed repeatedly."""


@pytest.fixture
async def pair(nixl: Pair, http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Pair:
    """The pair, with the circuit breaker closed again after failures of earlier tests."""
    await nixl.restore(http, request.session.testsfailed)
    await nixl.shake_hands(http)
    return nixl


async def test_a_hanging_prefill_falls_back(pair: Pair, http: aiohttp.ClientSession) -> None:
    body = ASKED.body("no answer comes " * 20)
    flags = ("--engine", f"http://{pair.decode.address}", "--prefill-allow", "127.0.0.0/8")
    async with (
        sidecar(*flags, "--pod-name", "decode-0", "--silence-timeout", "3s") as process,
        stopped(pair.prefill),
    ):
        answer = await ask(http, process.url(ASKED.path), body, pair.split)
    assert answer.headers[headers.ROUTING_PATH] == RoutingPath.FALLBACK
    assert ASKED.text(answer) == ASKED.text(await pair.alone(http, ASKED, body))


async def test_a_producer_killed_before_its_kv_is_read(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """The decode engine computes the prompt itself; the next request falls back."""
    body = ASKED.body("the harbour is empty " * 20)
    moved = await Moved(http, pair.decode.url("/metrics")).begin()
    async with stopped(pair.decode):
        client = asyncio.create_task(pair.handed_off(http, ASKED, body))
        await in_phase(pair, http, "decoding", 1)
        # It must be gone before the decode engine goes on.
        pair.prefill.process.end()
    answer = await client
    alone = ASKED.text(await pair.alone(http, ASKED, body))
    assert ASKED.text(answer) == alone
    assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    assert await moved.by(metrics.ENGINE_XFER_FAILED) > 0
    refused = await pair.handed_off(http, ASKED, body)
    assert refused.headers[headers.ROUTING_PATH] == RoutingPath.FALLBACK
    assert ASKED.text(refused) == alone


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_producer_that_stops_before_its_kv_is_read(
    pair: Pair, http: aiohttp.ClientSession, stream: bool
) -> None:
    """vLLM tells that the KV is still being loaded after `--kv-transfer-timeout`."""
    body = ASKED.body(f"{stream}: the harbour freezes " * 20, stream=stream)
    alone = ASKED.text(await pair.alone(http, ASKED, body))
    async with stopped(pair.decode):
        client = asyncio.create_task(pair.handed_off(http, ASKED, body))
        await in_phase(pair, http, "decoding", 1)
        pair.prefill.process.signal(signal.SIGSTOP)
    try:
        answer = await client
        assert answer.headers[headers.ROUTING_PATH] == RoutingPath.FALLBACK
        assert ASKED.text(answer) == alone
    finally:
        pair.prefill.process.signal(signal.SIGCONT)


async def test_a_decode_engine_killed_in_mid_stream(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """An error event ends the stream; the next request gets a 502."""
    body = ASKED.body("and the ship sails on " * 20, stream=True, max_tokens=3000)
    url = pair.url(ASKED.path)
    async with http.post(url, json=body, headers=pair.split) as answer:
        assert answer.status == 200
        await answer.content.readany()
        pair.decode.process.signal(signal.SIGKILL)
        remaining = (await answer.content.read()).decode()
    assert '"error"' in remaining.rstrip().rpartition("data: ")[2]
    assert DONE not in remaining
    refused = await pair.handed_off(http, ASKED, ASKED.body("Hello"))
    assert refused.status == 502


@pytest.mark.timeout(1800)
async def test_under_load_while_the_producer_is_killed_at_random(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    """No request hangs, is cut or wrong; hand-offs work again at the end."""
    prompts = [f"{i} and {i * i} are numbers, is what they say. " * (4 + i) for i in range(12)]
    bodies = [ASKED.body(prompt, logprobs=2) for prompt in prompts]
    alone = [await pair.alone(http, ASKED, body) for body in bodies]
    answers: list[tuple[int, Answer]] = []
    answered = asyncio.Event()

    def split_count() -> int:
        paths = [answer.headers.get(headers.ROUTING_PATH) for _, answer in answers]
        return paths.count(RoutingPath.PREFILL_THEN_DECODE)

    async def client(number: int) -> None:
        turn = number
        while len(answers) < LOAD:
            index = turn % len(bodies)
            salted: dict[str, Any] = bodies[index] | {"cache_salt": f"{number}-{turn}"}
            answers.append((index, await ask(http, pair.url(ASKED.path), salted, pair.split)))
            answered.set()
            turn += 1

    async def kill_producer_at_random() -> int:
        rng, kills = random.Random(1), 0
        while True:
            target = split_count() + rng.randrange(20, 120)
            while split_count() < target:
                if len(answers) >= LOAD:
                    return kills
                answered.clear()
                await answered.wait()
            pair.prefill.process.end()
            kills += 1
            pair.prefill.start()
            await until(lambda: asyncio.to_thread(pair.prefill.healthy), STARTS_WITHIN)

    async with asyncio.TaskGroup() as group:
        killing = group.create_task(kill_producer_at_random())
        for number in range(4):
            group.create_task(client(number))
    wrong_answers = [
        answer.body for index, answer in answers if not same_up_to_near_ties(answer, alone[index])
    ]
    print(f"\n{len(answers)} requests, {split_count()} split, {killing.result()} kills")
    assert wrong_answers == []
    assert 0 < split_count() < len(answers)
    assert killing.result() >= 2
    await pair.shake_hands(http)


NEAR = 0.05
"""Logprob difference below which float32 summation order in a batch may swap two tokens."""


def same_up_to_near_ties(answer: Answer, alone: Answer) -> bool:
    """Whether both texts agree up to the first token whose two candidates are within NEAR."""
    if answer.status != 200:
        return False
    actual, expected_logprobs = (
        response.json["choices"][0]["logprobs"] for response in (answer, alone)
    )
    if len(actual["tokens"]) != len(expected_logprobs["tokens"]):
        return False
    for i, (token, expected) in enumerate(
        zip(actual["tokens"], expected_logprobs["tokens"], strict=True)
    ):
        if token != expected:
            best = expected_logprobs["top_logprobs"][i]
            return token in best and abs(best[token] - best[expected]) < NEAR
        if abs(actual["token_logprobs"][i] - expected_logprobs["token_logprobs"][i]) > NEAR:
            return False
    return True
