"""KV that will not be read is released, whatever ended the hand-off."""

import asyncio
import ssl
from functools import partial
from pathlib import Path

import pytest
import trustme

from tandem_http1.client import Limits
from tandem_sidecar.security.credentials import Tls
from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import PARAMS, FakePrefill, Turn, hangs
from ..wire import wire

BODY = b'{"model": "m", "prompt": "Hi"}'
PATH = "X-Continuum-Routing-Path"


async def leave_during_prefill(harness: Harness, prefill: FakePrefill) -> None:
    before = len(prefill.requests)
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *(f"{k}: {v}" for k, v in harness.candidates.items()))
        await prefill.received(before + 1)


async def answers_too_late(turn: Turn) -> None:
    """Answer when the sidecar has closed, as if the answer had been on its way already."""
    await turn.gone.wait()
    turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")


async def released(harness: Harness) -> None:
    await asyncio.wait_for(harness.decode.released.wait(), 10)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    [release] = harness.decode.releases
    assert PARAMS in release.body


async def linger_after_leaving(harness: Harness, prefill: FakePrefill) -> None:
    """Disconnect, and wait until the sidecar is aborting the prefill."""
    await leave_during_prefill(harness, prefill)
    phases: list[object] = []
    async with asyncio.timeout(10):
        while phases != ["aborting"]:
            async with harness.http.get(harness.admin("/state")) as answer:
                phases = [work["phase"] for work in (await answer.json())["in_flight"]]


async def drops_for_who_closes(turn: Turn, go: asyncio.Event) -> None:
    """Like vLLM, send no answer to a peer that closed, even if it is ready."""
    await go.wait()
    if not turn.gone.is_set():
        turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")


async def ends_within_the_grace(harness: Harness, prefill: FakePrefill) -> None:
    await linger_after_leaving(harness, prefill)
    harness.go.set()
    await released(harness)
    assert harness.decode.requests == []


async def test_a_prefill_that_ends_within_its_grace_is_released(harness: Harness) -> None:
    prefill = await harness.prefill(partial(drops_for_who_closes, go=harness.go))
    await harness.start(prefill_grace=20.0)
    await ends_within_the_grace(harness, prefill)


async def test_a_prefill_that_ends_within_its_grace_is_released_over_tls(
    harness: Harness, tmp_path: Path
) -> None:
    """Over TLS one direction cannot be closed alone, so the grace is the only chance."""
    ca, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    prefill = await harness.prefill(partial(drops_for_who_closes, go=harness.go), tls=context)
    await harness.start(prefill_grace=20.0, tls=Tls(prefill=True, ca=tmp_path / "ca.pem"))
    await ends_within_the_grace(harness, prefill)


async def test_an_aborted_prefill_is_not_sent_again(harness: Harness) -> None:
    """Other requests are sent again if a pooled connection turns out to be closed."""

    async def dies_the_second_time(turn: Turn) -> None:
        if len(prefill.requests) == 1:
            turn.answer(200, b'{"kv_transfer_params": ' + PARAMS + b"}")
        else:
            await harness.go.wait()
            turn.die()

    prefill = await harness.prefill(dies_the_second_time)
    await harness.start(prefill_grace=20.0)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.headers[PATH] == "prefill_then_decode"
    await linger_after_leaving(harness, prefill)
    assert (len(prefill.requests), prefill.connections) == (2, 1)
    harness.go.set()
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert len(prefill.requests) == 2


@pytest.mark.parametrize(
    "settings",
    [{"limits": Limits(connections=1)}, {"connector": "nixl-push"}],
    ids=["crowd", "push"],
)
async def test_there_is_no_grace_for_many_requests_or_for_push(
    harness: Harness, settings: dict[str, object]
) -> None:
    disconnect = asyncio.Event()

    async def goes_on(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    prefill = await harness.prefill(goes_on)
    await harness.start(prefill_grace=1000.0, **settings)
    await leave_during_prefill(harness, prefill)
    await asyncio.wait_for(disconnect.wait(), 10)


async def test_there_is_no_grace_in_a_drain(harness: Harness) -> None:
    prefill = await harness.prefill(hangs)
    await harness.start(prefill_grace=1000.0, drain_timeout=0.2)
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *lines)
        await prefill.received(1)
        harness.sidecar.lifecycle.drain()
        await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


@pytest.mark.parametrize("grace", [0.0, 0.2])
async def test_an_answer_that_crosses_the_disconnect_is_released(
    harness: Harness, grace: float
) -> None:
    prefill = await harness.prefill(answers_too_late)
    await harness.start(prefill_grace=grace)
    await leave_during_prefill(harness, prefill)
    await released(harness)
    [release], [leg] = harness.decode.releases, prefill.requests
    assert release.headers["x-request-id"] == leg.headers["x-request-id"]
    assert harness.decode.requests == []


async def test_an_answer_that_crosses_the_deadline_is_released(harness: Harness) -> None:
    await harness.prefill(answers_too_late)
    await harness.start(prefill_timeout=0.3, prefill_grace=0.0)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
    if harness.prefills[0].requests:  # a busy machine may not get as far within the deadline
        await released(harness)


async def test_an_engine_that_ignores_the_abort_is_disconnected(harness: Harness) -> None:
    async def deaf(turn: Turn) -> None:
        await turn.gone.wait()
        await harness.go.wait()

    prefill = await harness.prefill(deaf)
    await harness.start(kv_transfer_timeout=0.2, prefill_grace=0.0)
    await leave_during_prefill(harness, prefill)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    harness.go.set()
    assert harness.decode.releases == []


@pytest.mark.parametrize("status", [400, 401, 422, 429])
async def test_a_decode_4xx_is_forwarded_and_releases(harness: Harness, status: int) -> None:
    async def refuses(turn: Turn) -> None:
        turn.answer(status, b'{"error":  "yours"}')

    await harness.prefill()
    await harness.start(refuses)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, await answer.read()) == (status, b'{"error":  "yours"}')
        assert answer.headers[PATH] == "prefill_then_decode"
    await released(harness)
    assert len(harness.decode.requests) == 1


async def test_a_decode_404_needs_no_release(harness: Harness) -> None:
    async def unknown(turn: Turn) -> None:
        turn.answer(404, b"{}")

    await harness.prefill()
    await harness.start(unknown)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 404
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert harness.decode.releases == []


async def test_a_decode_lost_before_admission_releases(harness: Harness) -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    await harness.prefill()
    await harness.start(dies)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 502
    await released(harness)


async def test_a_failed_load_without_fallback_releases(harness: Harness) -> None:
    async def fails(turn: Turn) -> None:
        turn.answer(500, b"{}")

    await harness.prefill()
    await harness.start(fails, policy=Policy(fallback_to_unified=False))
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 500
    await released(harness)
