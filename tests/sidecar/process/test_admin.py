"""The admin port of one process, and the drain that it begins."""

import asyncio
import json

import pytest
from yarl import URL

from tandem_contract import endpoints
from tandem_sidecar.security.route import AllowList
from tandem_sidecar.settings import Breaker

from ..conftest import LOOPBACK, Harness
from ..peers import Turn
from ..processes import drain
from ..wire import wire

STREAM = b'{"prompt": "do not tell", "stream": true}'
BODY = b'{"prompt": "do not tell"}'
SPLIT = 'disaggregated_requests_total{routing_path="prefill_then_decode"}'


async def until_ready(harness: Harness) -> None:
    async with asyncio.timeout(10):
        while True:
            async with harness.http.get(harness.admin("/readyz")) as answer:
                if answer.status == 200:
                    return


async def stream_until_go(turn: Turn, harness: Harness) -> None:
    """Stream one event, and the rest once `harness.go` is set."""
    turn.stream()
    turn.event("first")
    await harness.go.wait()
    turn.event("[DONE]")
    turn.end()


async def test_ready_when_the_engine_is_healthy(harness: Harness) -> None:
    await harness.start()
    await until_ready(harness)


async def test_not_ready_when_the_engine_is_unhealthy(harness: Harness) -> None:
    await harness.start()
    await until_ready(harness)
    harness.sidecar.health.healthy = False
    async with harness.http.get(harness.admin("/readyz")) as answer:
        assert answer.status == 503


async def test_the_kubelet_finds_a_pod_ready_until_its_engine_was_healthy_once(
    harness: Harness,
) -> None:
    await harness.start(engine=LOOPBACK._replace(port=1))
    for path, status in ((endpoints.READY, 503), (endpoints.READY_OR_STARTING, 200)):
        async with harness.http.get(harness.admin(path)) as answer:
            assert answer.status == status
    for healthy, status in ((True, 200), (False, 503)):
        harness.sidecar.health.healthy = healthy
        async with harness.http.get(harness.admin(endpoints.READY_OR_STARTING)) as answer:
            assert answer.status == status
    await drain(harness.sidecar.admin)


async def test_the_kubelet_finds_a_starting_pod_that_drains_not_ready(harness: Harness) -> None:
    await harness.start(engine=LOOPBACK._replace(port=1))
    await drain(harness.sidecar.admin)
    async with harness.http.get(harness.admin(endpoints.READY_OR_STARTING)) as answer:
        assert answer.status == 503


async def test_every_path_and_phase_is_exported_from_the_start(harness: Harness) -> None:
    await harness.start()
    async with harness.http.get(harness.admin("/metrics")) as answer:
        page = await answer.text()
    for path in ("fast_decode", "prefill_then_decode", "unified", "fallback"):
        assert f'disaggregated_requests_total{{routing_path="{path}"}} 0.0' in page
    for phase in ("prefill", "decode", "kv_transfer", "orchestration"):
        assert f'disaggregated_errors_total{{phase="{phase}"}} 0.0' in page
    assert "disaggregated_fallback_total 0.0" in page
    assert "disaggregated_kv_transfer_duration_seconds_count 0.0" in page


async def test_a_request_that_no_engine_served_is_told_from_the_unified_ones(
    harness: Harness,
) -> None:
    await harness.start(engine=LOOPBACK._replace(port=1))
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert answer.status == 502
    for name in ("disaggregated_requests_total", "tandem_sidecar_unserved_total"):
        assert await harness.metric(f'{name}{{routing_path="unified"}}') == 1


async def test_a_prefill_pod_with_a_loopback_side_channel_is_named(harness: Harness) -> None:
    prefill = await harness.prefill()
    # The kernel connects to this machine, by an address that is no loopback address.
    address = prefill.address._replace(host="0.0.0.0")
    await harness.start(allow=AllowList(addresses=frozenset({address})))
    sample = f'tandem_sidecar_loopback_side_channels{{backend="{address}"}}'
    assert await harness.metric(sample) == 0
    headers = {"x-prefiller-host-port": str(address)}
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.headers["x-continuum-routing-path"] == "prefill_then_decode"
    assert await harness.metric(sample) == 1


async def test_state_lists_running_requests_without_their_content(harness: Harness) -> None:
    await harness.prefill()
    await harness.start(lambda turn: stream_until_go(turn, harness))
    headers = harness.candidates | {"x-request-id": "r1"}
    async with harness.http.post(harness.url(), data=STREAM, headers=headers) as answer:
        await answer.content.readuntil(b"\n\n")
        async with harness.http.get(harness.admin("/state")) as page:
            text = await page.text()
        harness.go.set()
        await answer.read()
    assert "do not tell" not in text
    [item] = json.loads(text)["in_flight"]
    assert item.pop("age_seconds") >= 0
    assert item == {"request_id": "r1", "path": "prefill_then_decode", "phase": "answering"}


async def test_drain_refuses_new_requests_and_finishes_running_ones(harness: Harness) -> None:
    await harness.start(lambda turn: stream_until_go(turn, harness))
    await until_ready(harness)
    async with harness.http.post(harness.url(), data=STREAM) as answer:
        await answer.content.readuntil(b"\n\n")
        assert await drain(harness.sidecar.admin) == {"draining": True, "in_flight": 1}
        waiting = asyncio.create_task(drained(harness))
        for path in ("/v1/completions", "/v1/embeddings"):
            async with harness.http.post(harness.url(path), data=BODY) as refused:
                assert refused.status == 503
        async with harness.http.get(harness.admin("/readyz")) as ready:
            assert ready.status == 503
        assert not waiting.done()
        harness.go.set()
        assert (await answer.read()) == b"data: [DONE]\n\n"
    assert await waiting == {"draining": True, "in_flight": 0}


async def drained(harness: Harness) -> object:
    return await drain(harness.sidecar.admin, wait=True)


async def test_the_admin_port_does_not_drain(harness: Harness) -> None:
    await harness.start()
    async with harness.http.post(harness.admin("/drain")) as answer:
        assert answer.status == 403
    async with harness.http.get(harness.admin("/state")) as page:
        assert (await page.json())["draining"] is False


async def test_get_does_not_drain(harness: Harness) -> None:
    await harness.start()
    async with harness.http.get(harness.admin("/drain?wait=true")) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    await until_ready(harness)


async def test_after_the_drain_timeout_a_stream_ends_with_an_error_event(harness: Harness) -> None:
    await harness.start(lambda turn: stream_until_go(turn, harness), drain_timeout=0.1)
    async with harness.http.post(harness.url(), data=STREAM) as answer:
        await answer.content.readuntil(b"\n\n")
        assert await drained(harness) == {"draining": True, "in_flight": 0}
        event = await answer.read()
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_after_the_drain_timeout_a_request_without_an_answer_gets_503(
    harness: Harness, path: str
) -> None:
    async def script(turn: Turn) -> None:
        await turn.gone.wait()

    await harness.start(script, drain_timeout=0.1)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, path=path)
        await harness.decode.received(1)
        await drained(harness)
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await client.closed() == b""


async def test_after_the_drain_timeout_kv_that_was_not_read_is_released(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        await turn.gone.wait()

    await harness.prefill()
    await harness.start(script, drain_timeout=0.1)
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *lines)
        await harness.decode.received(1)
        await drained(harness)
        assert (await client.response()).status == 503
    assert len(harness.decode.releases) == 1


async def test_livez_answers_200_during_a_drain(harness: Harness) -> None:
    await harness.start()
    for _ in range(2):
        assert await drain(harness.sidecar.admin) == {"draining": True, "in_flight": 0}
    async with harness.http.get(harness.admin("/livez")) as answer:
        assert answer.status == 200


async def test_a_client_that_connects_after_the_drain_gets_503_with_retry_after(
    harness: Harness,
) -> None:
    await harness.start()
    await drained(harness)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY)
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert int(answer.headers["retry-after"]) > 0
        assert await client.closed() == b""


async def test_a_request_is_found_by_its_id(harness: Harness) -> None:
    await harness.start()
    headers = {"x-request-id": "a/bc"}
    async with harness.http.post(harness.url(), data=BODY, headers=headers) as answer:
        assert answer.status == 200
    async with harness.http.get(URL(harness.admin("/requests/a%2Fbc"), encoded=True)) as page:
        [trace] = await page.json()
    assert (trace["request_id"], trace["path"]) == ("a/bc", "unified")
    async with harness.http.get(harness.admin("/requests/other")) as page:
        assert (page.status, await page.json()) == (404, [])


async def test_open_circuit_breakers_are_shown(harness: Harness) -> None:
    async def broken(turn: Turn) -> None:
        turn.answer(500, b"{}")

    peer = await harness.prefill(broken)
    await harness.start(breaker=Breaker(failures=1, cooldown=60.0))
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 200
    async with harness.http.get(harness.admin("/state")) as page:
        pod = (await page.json())["prefill_pods"][str(peer.address)]
    assert (pod["condition"], pod["failures"]) == ("open", 1)
    assert await harness.metric(f'tandem_sidecar_breaker_open{{backend="{peer.address}"}}') == 1


@pytest.mark.parametrize("path", ["/metrics", "/state", "/livez", "/readyz", "/requests/r"])
async def test_only_drain_accepts_post(harness: Harness, path: str) -> None:
    await harness.start()
    async with harness.http.post(harness.admin(path), data=b"x" * 100_000) as answer:
        assert answer.status == 405
