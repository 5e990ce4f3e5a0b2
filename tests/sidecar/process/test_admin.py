"""The admin port of one process, and the drain that it begins."""

import asyncio
import json

import pytest
from yarl import URL

from tandem_sidecar.settings import Breaker

from ..conftest import World
from ..peers import Turn
from ..wire import wire

STREAM = b'{"prompt": "do not tell", "stream": true}'
BODY = b'{"prompt": "do not tell"}'
SPLIT = 'disaggregated_requests_total{routing_path="prefill_then_decode"}'


async def until_ready(world: World) -> None:
    async with asyncio.timeout(10):
        while True:
            async with world.http.get(world.admin("/readyz")) as answer:
                if answer.status == 200:
                    return


async def held(turn: Turn, world: World) -> None:
    """Stream one event, and the rest once `world.go` is set."""
    turn.stream()
    turn.event("first")
    await world.go.wait()
    turn.event("[DONE]")
    turn.end()


async def test_ready_when_the_engine_is_healthy(world: World) -> None:
    await world.start()
    await until_ready(world)


async def test_not_ready_when_the_engine_is_unhealthy(world: World) -> None:
    await world.start()
    await until_ready(world)
    world.running.health.healthy = False
    async with world.http.get(world.admin("/readyz")) as answer:
        assert answer.status == 503


async def test_every_path_and_phase_is_exported_from_the_start(world: World) -> None:
    await world.start()
    async with world.http.get(world.admin("/metrics")) as answer:
        page = await answer.text()
    for path in ("fast_decode", "prefill_then_decode", "unified", "fallback"):
        assert f'disaggregated_requests_total{{routing_path="{path}"}} 0.0' in page
    for phase in ("prefill", "decode", "kv_transfer", "orchestration"):
        assert f'disaggregated_errors_total{{phase="{phase}"}} 0.0' in page
    assert "disaggregated_fallback_total 0.0" in page
    assert "disaggregated_kv_transfer_duration_seconds_count 0.0" in page


async def test_state_lists_running_requests_without_their_content(world: World) -> None:
    await world.prefill()
    await world.start(lambda turn: held(turn, world))
    headers = world.split | {"x-request-id": "r1"}
    async with world.http.post(world.url(), data=STREAM, headers=headers) as answer:
        await answer.content.readuntil(b"\n\n")
        async with world.http.get(world.admin("/state")) as got:
            text = await got.text()
        world.go.set()
        await answer.read()
    assert "do not tell" not in text
    [item] = json.loads(text)["in_flight"]
    assert item.pop("age_seconds") >= 0
    assert item == {"request_id": "r1", "path": "prefill_then_decode", "phase": "answering"}


async def test_drain_refuses_new_requests_and_finishes_running_ones(world: World) -> None:
    await world.start(lambda turn: held(turn, world))
    await until_ready(world)
    async with world.http.post(world.url(), data=STREAM) as answer:
        await answer.content.readuntil(b"\n\n")
        async with world.http.post(world.admin("/drain")) as drain:
            assert await drain.json() == {"draining": True, "in_flight": 1}
        waiting = asyncio.create_task(drained(world))
        for path in ("/v1/completions", "/v1/embeddings"):
            async with world.http.post(world.url(path), data=BODY) as refused:
                assert refused.status == 503
        async with world.http.get(world.admin("/readyz")) as ready:
            assert ready.status == 503
        assert not waiting.done()
        world.go.set()
        assert (await answer.read()) == b"data: [DONE]\n\n"
    assert await waiting == {"draining": True, "in_flight": 0}


async def drained(world: World) -> object:
    async with world.http.get(world.admin("/drain?wait=true")) as answer:
        return await answer.json()


async def test_after_the_drain_timeout_a_stream_ends_with_an_error_event(world: World) -> None:
    await world.start(lambda turn: held(turn, world), drain_timeout=0.1)
    async with world.http.post(world.url(), data=STREAM) as answer:
        await answer.content.readuntil(b"\n\n")
        assert await drained(world) == {"draining": True, "in_flight": 0}
        event = await answer.read()
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/other"])
async def test_after_the_drain_timeout_a_request_without_an_answer_gets_503(
    world: World, path: str
) -> None:
    async def script(turn: Turn) -> None:
        await turn.gone.wait()

    await world.start(script, drain_timeout=0.1)
    async with wire(world.running.listen) as client:
        client.post(BODY, path=path)
        await world.decode.received(1)
        await drained(world)
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert await client.closed() == b""


async def test_after_the_drain_timeout_kv_that_was_not_read_is_released(world: World) -> None:
    async def script(turn: Turn) -> None:
        await turn.gone.wait()

    await world.prefill()
    await world.start(script, drain_timeout=0.1)
    lines = [f"{k}: {v}" for k, v in world.split.items()]
    async with wire(world.running.listen) as client:
        client.post(BODY, *lines)
        await world.decode.received(1)
        await drained(world)
        assert (await client.response()).status == 503
    assert len(world.decode.releases) == 1


async def test_livez_answers_200_during_a_drain(world: World) -> None:
    await world.start()
    for verb in (world.http.post, world.http.get):
        async with verb(world.admin("/drain")) as drain:
            assert await drain.json() == {"draining": True, "in_flight": 0}
    async with world.http.get(world.admin("/livez")) as answer:
        assert answer.status == 200


async def test_a_client_that_connects_after_the_drain_gets_503_with_retry_after(
    world: World,
) -> None:
    await world.start()
    await drained(world)
    async with wire(world.running.listen) as client:
        client.post(BODY)
        answer = await client.response()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert int(answer.headers["retry-after"]) > 0
        assert await client.closed() == b""


async def test_a_request_is_found_by_its_id(world: World) -> None:
    await world.start()
    mine = {"x-request-id": "a/bc"}
    async with world.http.post(world.url(), data=BODY, headers=mine) as answer:
        assert answer.status == 200
    async with world.http.get(URL(world.admin("/requests/a%2Fbc"), encoded=True)) as got:
        [trace] = await got.json()
    assert (trace["request_id"], trace["path"]) == ("a/bc", "unified")
    async with world.http.get(world.admin("/requests/other")) as got:
        assert (got.status, await got.json()) == (404, [])


async def test_open_circuit_breakers_are_shown(world: World) -> None:
    async def broken(turn: Turn) -> None:
        turn.answer(500, b"{}")

    peer = await world.prefill(broken)
    await world.start(breaker=Breaker(failures=1, cooldown=60.0))
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.status == 200
    async with world.http.get(world.admin("/state")) as got:
        pod = (await got.json())["prefill_pods"][str(peer.address)]
    assert (pod["condition"], pod["failures"]) == ("open", 1)
    assert await world.metric(f'tandem_sidecar_breaker_open{{backend="{peer.address}"}}') == 1


@pytest.mark.parametrize("path", ["/metrics", "/state", "/livez", "/readyz", "/requests/r"])
async def test_only_drain_accepts_post(world: World, path: str) -> None:
    await world.start()
    async with world.http.post(world.admin(path), data=b"x" * 100_000) as answer:
        assert answer.status == 405
