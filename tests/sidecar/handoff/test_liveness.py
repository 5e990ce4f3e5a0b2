"""Legs of a hung engine fail; those of a slow engine that answers health checks do not."""

import asyncio
import json
from io import BytesIO

import pytest

from tandem_contract.prompt_length import EXHAUSTING
from tandem_http1.upstream import Pool
from tandem_sidecar.handoff.engine_liveness import LegLiveness
from tandem_sidecar.handoff.liveness import LivenessMonitor
from tandem_sidecar.settings import Breaker, Patience, Policy

from ..conftest import Harness
from ..peers import FakeDecode, Turn, hangs, healthy

BODY = b'{"model": "m", "prompt": "Hi"}'
STREAM = b'{"model": "m", "prompt": "Hi", "stream": true}'
PATH = "X-Continuum-Routing-Path"
SILENCE = 0.2


async def test_a_hung_prefill_pod_is_replaced_by_the_next_candidate(harness: Harness) -> None:
    first = await harness.prefill(hangs)
    first.health = hangs
    second = await harness.prefill()
    await harness.start(silence_timeout=SILENCE, breaker=Breaker(cooldown=3600))
    for _ in range(2):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")
            assert answer.headers["X-Continuum-Prefill-Backend"] == str(second.address)
    assert len(first.requests) == 1, "its circuit is open for the next request"


async def test_a_hung_prefill_pod_without_another_falls_back(harness: Harness) -> None:
    prefill = await harness.prefill(hangs)
    prefill.health = hangs
    await harness.start(silence_timeout=SILENCE, breaker=Breaker(cooldown=3600))
    for _ in range(2):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert (answer.status, answer.headers[PATH]) == (200, "fallback")
    assert len(prefill.requests) == 1


LONG = json.dumps({"model": "m", "prompt": "x" * (EXHAUSTING + 1)}).encode()


@pytest.mark.parametrize("reason", ["hung", "late"])
async def test_a_prompt_that_may_hang_engines_is_sent_to_one_only(
    harness: Harness, reason: str
) -> None:
    first = await harness.prefill(hangs)
    if reason == "hung":
        first.health = hangs
    second = await harness.prefill()
    timeout = SILENCE if reason == "late" else 60.0
    await harness.start(silence_timeout=SILENCE, prefill_timeout=timeout)
    async with harness.http.post(
        harness.url(), data=BytesIO(LONG), headers=harness.candidates
    ) as answer:
        assert (answer.status, answer.headers[PATH]) == (504, "prefill_then_decode")
        assert answer.headers["x-should-retry"] == "false"
    assert (len(first.requests), len(second.requests)) == (1, 0)
    assert harness.decode.requests == []


async def test_a_large_image_does_not_count_as_text(harness: Harness) -> None:
    prefill = await harness.prefill(hangs)
    prefill.health = hangs
    await harness.start(silence_timeout=SILENCE)
    url = "data:image/png;base64," + "A" * EXHAUSTING
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()
    async with harness.http.post(
        harness.url("/v1/chat/completions"), data=BytesIO(body), headers=harness.candidates
    ) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")


async def test_a_slow_prefill_engine_that_answers_health_checks_is_waited_for(
    harness: Harness,
) -> None:
    probe = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await probe.wait()
        await prefill.default(turn)

    async def counting(turn: Turn) -> None:
        await healthy(turn)
        checks.append(turn)
        if len(checks) == 3:
            probe.set()

    checks: list[Turn] = []
    prefill = await harness.prefill(slow)
    prefill.health = counting
    await harness.start(silence_timeout=SILENCE)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")
    assert len(prefill.requests) == 1


async def test_a_hung_decode_engine_before_the_first_byte_is_a_502(harness: Harness) -> None:
    await harness.start(hangs, silence_timeout=SILENCE)
    harness.decode.health = hangs
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert answer.status == 502
        assert "no sign of life" in (await answer.json())["error"]["message"]
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_hung_decode_engine_in_mid_stream_ends_in_an_error_event(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await turn.gone.wait()

    await harness.start(script, silence_timeout=SILENCE)
    harness.decode.health = hangs
    async with harness.http.post(harness.url(), data=STREAM) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        event = await answer.content.read()
    assert json.loads(event[6:])["error"]["code"] == 502


async def test_a_leg_that_ended_with_another_is_not_reported_hung() -> None:
    class Twin:
        def __init__(self) -> None:
            self.liveness: LegLiveness
            self.other: Twin

        def engine_hung(self, detail: str) -> None:
            failure.set_result(detail)
            self.other.liveness.unwatch()

    failure = asyncio.get_running_loop().create_future()
    pool, (first, second) = Pool(), (Twin(), Twin())
    monitor = LivenessMonitor(pool, SILENCE, Patience())
    async with FakeDecode() as engine:
        engine.health = hangs
        for leg, twin in ((first, second), (second, first)):
            leg.other, leg.liveness = twin, monitor.watch(engine.address, leg)
        assert "no sign of life" in await asyncio.wait_for(failure, 10)
        assert not first.liveness.engine.legs
        monitor.close()
    pool.close()


@pytest.mark.parametrize("fallback", [True, False])
async def test_when_the_circuit_of_every_prefill_pod_is_open(
    harness: Harness, fallback: bool
) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    prefill = await harness.prefill(fails)
    breaker = Breaker(failures=2, cooldown=3600)
    await harness.start(breaker=breaker, policy=Policy(fallback))
    for expected in (502, 502, 503):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert answer.status == (200 if fallback else expected)
            assert answer.headers[PATH] == ("fallback" if fallback else "prefill_then_decode")
            assert ("Retry-After" in answer.headers) == (answer.status == 503)
    assert len(prefill.requests) == 2


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_prefill_pod_gets_no_requests_until_its_retry_after(
    harness: Harness, status: int
) -> None:
    async def busy(turn: Turn) -> None:
        turn.answer(status, b"{}", "Retry-After: 30")

    first = await harness.prefill(busy)
    second = await harness.prefill()
    await harness.start(breaker=Breaker(failures=1, cooldown=3600))
    for _ in range(3):
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert answer.headers["X-Continuum-Prefill-Backend"] == str(second.address)
    assert len(first.requests) == 1


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_decode_engine_s_answer_is_forwarded(harness: Harness, status: int) -> None:
    async def busy(turn: Turn) -> None:
        turn.answer(status, b'{"error": "busy"}', "Retry-After: 17")

    await harness.prefill()
    await harness.start(busy)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, await answer.read()) == (status, b'{"error": "busy"}')
        assert answer.headers.getall("Retry-After") == ["17"]
    assert len(harness.decode.requests) == 1
    await asyncio.wait_for(harness.decode.released.wait(), 10)


async def test_an_engine_that_shuts_down_and_finishes_its_requests_is_waited_for(
    harness: Harness,
) -> None:
    """A server that shuts down closes its listener first: a refused connection is alive."""
    probe = asyncio.Event()

    async def slow(turn: Turn) -> None:
        prefill.close_port()
        await probe.wait()
        await prefill.default(turn)

    prefill = await harness.prefill(slow)
    await harness.start(silence_timeout=SILENCE)
    asyncio.get_running_loop().call_later(4 * SILENCE, probe.set)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")
