"""What the router does without healthy backends of a phase, rule by rule of its document."""

import json

import pytest

from tandem_epp.backends.health import HealthState
from tandem_sidecar.settings import Breaker, Settings

from ..sidecar.peers import Peer, Turn, hangs
from .conftest import DECODE, LOOPBACK, PATH, PREFILL, Harness


async def fails(turn: Turn) -> None:
    turn.answer(500, b"{}")


def is_down(peer: Peer) -> Peer:
    """`peer`, which passes no health check."""
    peer.metrics = fails
    return peer


async def test_without_a_healthy_prefill_backend_a_unified_one_prefills(harness: Harness) -> None:
    is_down(await harness.prefill("p"))
    await harness.decode("d")
    await harness.unified("u")
    await harness.start()
    for number in range(5):
        response, _ = await harness.ask({"model": "m", "prompt": [number] * 40})
        of_answer = response.headers
        served = of_answer[PATH], of_answer.get(PREFILL), of_answer[DECODE]
        assert served == ("prefill_then_decode", "u", "d")


async def test_without_prefill_and_unified_backends_the_decode_backend_serves_alone(
    harness: Harness,
) -> None:
    is_down(await harness.prefill("p"))
    await harness.decode("d")
    await harness.start()
    response, _ = await harness.ask()
    assert (response.status, response.headers[PATH]) == (200, "fallback")
    assert response.headers[DECODE] == "d"
    assert PREFILL not in response.headers
    assert await harness.metric("disaggregated_fallback_total") == 1
    assert await harness.metric('disaggregated_requests_total{routing_path="fallback"}') == 1


async def test_without_a_healthy_decode_backend_a_unified_one_serves(harness: Harness) -> None:
    await harness.prefill("p")
    is_down(await harness.decode("d"))
    await harness.unified("u")
    await harness.start()
    response, _ = await harness.ask()
    assert response.headers[DECODE] == "u"


async def test_without_decode_and_unified_backends_the_standard_pool_serves(
    harness: Harness,
) -> None:
    prefill = await harness.prefill("p", serves_alone)
    is_down(await harness.decode("d"))
    await harness.start()
    # The router itself removes what only a hand-off may set, so any backend may serve any request.
    body = {"model": "m", "prompt": "Hi", "kv_transfer_params": {"do_remote_prefill": True}}
    response, answer = await harness.ask(body)
    assert (response.status, response.headers[PATH]) == (200, "fallback")
    assert response.headers[DECODE] == "p"
    assert json.loads(answer) == {"choices": []}
    assert "kv_transfer_params" not in prefill.requests[0].json


@pytest.mark.parametrize("down", ["prefill", "decode"])
async def test_without_the_fallback_such_requests_are_refused(harness: Harness, down: str) -> None:
    prefill, decode = await harness.prefill("p"), await harness.decode("d")
    is_down(prefill if down == "prefill" else decode)
    await harness.start({"fallback_to_unified": False})
    response, answer = await harness.ask()
    assert response.status == 503
    assert response.headers["retry-after"] == "1"
    assert "backend" in json.loads(answer)["error"]["message"]
    assert not prefill.requests + decode.requests


@pytest.mark.parametrize("busy", ["prefill", "decode"])
async def test_without_the_fallback_only_the_busy_backend_is_busy(
    harness: Harness, busy: str
) -> None:
    async def is_busy(turn: Turn) -> None:
        turn.answer(503, b"{}", "Retry-After: 9")

    await harness.prefill("p", is_busy if busy == "prefill" else None)
    await harness.decode("d", is_busy if busy == "decode" else None)
    await harness.start({"fallback_to_unified": False})
    response, _ = await harness.ask()
    assert (response.status, response.headers["retry-after"]) == (503, "9")
    fleet = harness.router.components.decisions.fleet
    paused = [pod.name for pod in fleet if pod.health.state is HealthState.PAUSED]
    assert paused == (["d"] if busy == "decode" else [])


async def test_without_any_healthy_backend_requests_are_refused(harness: Harness) -> None:
    is_down(await harness.unified("u"))
    await harness.start()
    response, _ = await harness.ask()
    assert response.status == 503
    async with harness.http.get(harness.url("/health")) as health:
        assert health.status == 503


async def test_a_prefill_past_its_timeout_falls_back(harness: Harness) -> None:
    await harness.prefill("p", hangs)
    decode = await harness.decode("d")
    await harness.start({"prefill_timeout": "50ms"})
    response, _ = await harness.ask()
    assert (response.status, response.headers[PATH]) == (200, "fallback")
    assert "kv_transfer_params" not in decode.requests[-1].json
    assert await harness.metric('disaggregated_errors_total{phase="prefill"}') == 1


async def test_a_failing_prefill_backend_is_replaced_by_the_next(harness: Harness) -> None:
    failing, working = await harness.prefill("p-0", fails), await harness.prefill("p-1")
    await harness.decode("d")
    breaker = Breaker(failures=3, cooldown=3600.0)
    await harness.start(settings=Settings(listen=LOOPBACK, admin=LOOPBACK, breaker=breaker))
    for number in range(12):
        response, _ = await harness.ask({"model": "m", "prompt": [number] * 40})
        assert response.headers[PATH] == "prefill_then_decode"
        assert response.headers[PREFILL] == "p-1"
    assert len(working.requests) == 12
    # The circuit breaker, or the picker's, keeps requests from a backend that only fails.
    assert 1 <= len(failing.requests) <= breaker.failures


async def serves_alone(turn: Turn) -> None:
    turn.answer(200, b'{"choices": []}')
