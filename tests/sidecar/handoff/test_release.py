"""KV that will not be read is released, whatever ended the hand-off."""

import asyncio
import ssl
from functools import partial
from pathlib import Path

import pytest
import trustme

from tandem_sidecar.http.server import Limits
from tandem_sidecar.security.credentials import Tls
from tandem_sidecar.settings import Policy

from ..conftest import World
from ..peers import PARAMS, FakePrefill, Turn, hangs
from ..wire import wire

BODY = b'{"model": "m", "prompt": "Hi"}'
PATH = "X-Continuum-Routing-Path"


async def leave_during_prefill(world: World, prefill: FakePrefill) -> None:
    before = len(prefill.requests)
    async with wire(world.running.listen) as client:
        client.post(BODY, *(f"{k}: {v}" for k, v in world.split.items()))
        await prefill.received(before + 1)


async def answers_too_late(turn: Turn) -> None:
    """Answer when the sidecar has closed, as if the answer had been on its way already."""
    await turn.gone.wait()
    turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")


async def released(world: World) -> None:
    await asyncio.wait_for(world.decode.released.wait(), 10)
    await asyncio.wait_for(world.running.lifecycle.idle(), 10)
    [release] = world.decode.releases
    assert PARAMS in release.body


async def linger_after_leaving(world: World, prefill: FakePrefill) -> None:
    """Disconnect, and wait until the sidecar is aborting the prefill."""
    await leave_during_prefill(world, prefill)
    phases: list[object] = []
    async with asyncio.timeout(10):
        while phases != ["aborting"]:
            async with world.http.get(world.admin("/state")) as answer:
                phases = [work["phase"] for work in (await answer.json())["in_flight"]]


async def drops_for_who_closes(turn: Turn, go: asyncio.Event) -> None:
    """Like vLLM, send no answer to a peer that closed, even if it is ready."""
    await go.wait()
    if not turn.gone.is_set():
        turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")


async def ends_within_the_grace(world: World, prefill: FakePrefill) -> None:
    await linger_after_leaving(world, prefill)
    world.go.set()
    await released(world)
    assert world.decode.requests == []


async def test_a_prefill_that_ends_within_its_grace_is_released(world: World) -> None:
    prefill = await world.prefill(partial(drops_for_who_closes, go=world.go))
    await world.start(prefill_grace=20.0)
    await ends_within_the_grace(world, prefill)


async def test_a_prefill_that_ends_within_its_grace_is_released_over_tls(
    world: World, tmp_path: Path
) -> None:
    """Over TLS one direction cannot be closed alone, so the grace is the only chance."""
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    prefill = await world.prefill(partial(drops_for_who_closes, go=world.go), tls=context)
    await world.start(prefill_grace=20.0, tls=Tls(prefill=True, ca=tmp_path / "ca.pem"))
    await ends_within_the_grace(world, prefill)


async def test_an_aborted_prefill_is_not_sent_again(world: World) -> None:
    """Other requests are sent again if a pooled connection turns out to be closed."""

    async def dies_the_second_time(turn: Turn) -> None:
        if len(prefill.requests) == 1:
            turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")
        else:
            await world.go.wait()
            turn.die()

    prefill = await world.prefill(dies_the_second_time)
    await world.start(prefill_grace=20.0)
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.headers[PATH] == "prefill_then_decode"
    await linger_after_leaving(world, prefill)
    assert (len(prefill.requests), prefill.connections) == (2, 1)
    world.go.set()
    await asyncio.wait_for(world.running.lifecycle.idle(), 10)
    assert len(prefill.requests) == 2


@pytest.mark.parametrize(
    "why", [{"limits": Limits(connections=1)}, {"connector": "nixl-push"}], ids=["crowd", "push"]
)
async def test_there_is_no_grace_for_many_requests_or_for_push(
    world: World, why: dict[str, object]
) -> None:
    left = asyncio.Event()

    async def goes_on(turn: Turn) -> None:
        await turn.gone.wait()
        left.set()

    prefill = await world.prefill(goes_on)
    await world.start(prefill_grace=1000.0, **why)
    await leave_during_prefill(world, prefill)
    await asyncio.wait_for(left.wait(), 10)


async def test_there_is_no_grace_in_a_drain(world: World) -> None:
    prefill = await world.prefill(hangs)
    await world.start(prefill_grace=1000.0, drain_timeout=0.2)
    lines = [f"{k}: {v}" for k, v in world.split.items()]
    async with wire(world.running.listen) as client:
        client.post(BODY, *lines)
        await prefill.received(1)
        world.running.lifecycle.drain()
        await asyncio.wait_for(world.running.lifecycle.idle(), 10)


@pytest.mark.parametrize("grace", [0.0, 0.2])
async def test_an_answer_that_crosses_the_disconnect_is_released(
    world: World, grace: float
) -> None:
    prefill = await world.prefill(answers_too_late)
    await world.start(prefill_grace=grace)
    await leave_during_prefill(world, prefill)
    await released(world)
    [release], [leg] = world.decode.releases, prefill.requests
    assert release.headers["x-request-id"] == leg.headers["x-request-id"]
    assert world.decode.requests == []


async def test_an_answer_that_crosses_the_deadline_is_released(world: World) -> None:
    await world.prefill(answers_too_late)
    await world.start(prefill_timeout=0.3, prefill_grace=0.0)
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
    if world.prefills[0].requests:  # a busy machine may not get as far within the deadline
        await released(world)


async def test_an_engine_that_ignores_the_abort_is_disconnected(world: World) -> None:
    async def deaf(turn: Turn) -> None:
        await turn.gone.wait()
        await world.go.wait()

    prefill = await world.prefill(deaf)
    await world.start(kv_transfer_timeout=0.2, prefill_grace=0.0)
    await leave_during_prefill(world, prefill)
    await asyncio.wait_for(world.running.lifecycle.idle(), 10)
    world.go.set()
    assert world.decode.releases == []


@pytest.mark.parametrize("status", [400, 401, 422, 429])
async def test_a_decode_4xx_is_forwarded_and_releases(world: World, status: int) -> None:
    async def refuses(turn: Turn) -> None:
        turn.answer(status, b'{"error":  "yours"}')

    await world.prefill()
    await world.start(refuses)
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert (answer.status, await answer.read()) == (status, b'{"error":  "yours"}')
        assert answer.headers[PATH] == "prefill_then_decode"
    await released(world)
    assert len(world.decode.requests) == 1


async def test_a_decode_404_needs_no_release(world: World) -> None:
    async def unknown(turn: Turn) -> None:
        turn.answer(404, b"{}")

    await world.prefill()
    await world.start(unknown)
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.status == 404
    await asyncio.wait_for(world.running.lifecycle.idle(), 10)
    assert world.decode.releases == []


async def test_a_decode_lost_before_admission_releases(world: World) -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    await world.prefill()
    await world.start(dies)
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.status == 502
    await released(world)


async def test_a_failed_load_without_fallback_releases(world: World) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    await world.prefill()
    await world.start(fails, policy=Policy(fallback_to_unified=False))
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.status == 500
    await released(world)
