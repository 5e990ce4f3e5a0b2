"""Connectors with concurrent legs: no decode byte reaches the client before the prefill's 2xx."""

import asyncio
import json

import pytest

from tandem_http1.framing import chunk
from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import FakePrefill, Peer, Turn
from ..wire import wire

BODY = b'{"model": "m", "prompt": "Hi"}'
STREAM = b'{"model": "m", "prompt": "Hi", "stream": true}'
PATH = "X-Continuum-Routing-Path"
ENDED = b'{"id": "c", "choices": [{"finish_reason": "length"}]}'


async def close_without_answer(turn: Turn) -> None:
    turn.die()


async def prefilled(turn: Turn) -> None:
    turn.answer(200, ENDED)


async def test_both_legs_are_sent_at_once_with_one_id(harness: Harness) -> None:
    async def waits(turn: Turn) -> None:
        await harness.go.wait()
        turn.answer(200, ENDED)

    prefill = await harness.prefill(waits)
    await harness.start(connector="offloading")
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(STREAM, *lines)
        [first] = await prefill.received(1)
        [second] = await harness.decode.received(1)
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        harness.go.set()
        answer = await client.response()
    assert (answer.status, answer.headers[PATH.lower()]) == (200, "prefill_then_decode")
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_decode_waits_for_the_prefills_2xx(harness: Harness) -> None:
    """The prefill is refused after decode has answered: decode is asked again, without the KV."""

    async def refuses(turn: Turn) -> None:
        await sent.wait()
        turn.answer(422, b'{"error": "no"}')

    async def streams(turn: Turn) -> None:
        if b"kv_transfer_params" not in turn.request.body:
            await harness.decode.complete(turn)
            return
        turn.stream()
        turn.event("first")
        await turn.writer.drain()
        sent.set()
        await turn.gone.wait()
        disconnect.set()

    sent, disconnect = asyncio.Event(), asyncio.Event()
    await harness.prefill(refuses)
    await harness.start(streams, connector="offloading")
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(disconnect.wait(), 10)


async def test_a_failed_prefill_aborts_its_decode_leg_and_tries_the_next(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def decodes(turn: Turn) -> None:
        if turn.request is harness.decode.requests[0]:
            await turn.gone.wait()
            disconnect.set()
        else:
            await harness.decode.complete(turn)

    async def dies(turn: Turn) -> None:
        await harness.decode.received(1)
        turn.die()

    await harness.prefill(dies)
    await harness.prefill(prefilled)
    await harness.start(decodes, connector="offloading")
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")
        assert (await answer.read()).endswith(b"[DONE]\n\n")
    await asyncio.wait_for(disconnect.wait(), 10)
    assert len({r.headers["x-request-id"] for r in harness.decode.requests}) == 2


async def test_a_decode_failure_aborts_the_prefill(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def waits(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    await harness.prefill(waits)
    await harness.start(close_without_answer, connector="offloading")
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 502
    await asyncio.wait_for(disconnect.wait(), 10)


async def test_a_disconnect_aborts_both_legs(harness: Harness) -> None:
    prefill_left, decode_left = asyncio.Event(), asyncio.Event()

    async def waits(turn: Turn) -> None:
        await turn.gone.wait()
        prefill_left.set()

    async def waits_too(turn: Turn) -> None:
        await turn.gone.wait()
        decode_left.set()

    prefill = await harness.prefill(waits)
    await harness.start(waits_too, connector="offloading")
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()]
    async with wire(harness.sidecar.listen) as client:
        client.post(BODY, *lines)
        await prefill.received(1)
        await harness.decode.received(1)
    await asyncio.wait_for(prefill_left.wait(), 10)
    await asyncio.wait_for(decode_left.wait(), 10)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


class Registry(Peer):
    """Mooncake's bootstrap server on a prefill pod."""

    async def default(self, turn: Turn) -> None:
        turn.answer(200, b'{"0": {"engine_id": "engine-p"}}')


async def with_registry(harness: Harness, registry: Registry, prefill: FakePrefill) -> None:
    harness.prefills = [prefill]
    port = registry.address.port
    await harness.start(connector="mooncake", peer_port=port, policy=Policy(False))


async def test_a_peer_query_precedes_the_first_hand_off_and_follows_a_failure(
    harness: Harness,
) -> None:
    statuses = [200, 200, 500, 200]

    async def prefills(turn: Turn) -> None:
        turn.answer(statuses[len(prefill.requests) - 1], ENDED)

    prefill = await harness.prefill(prefills)
    async with Registry() as registry:
        await with_registry(harness, registry, prefill)
        for status in statuses:
            async with harness.http.post(
                harness.url(), data=BODY, headers=harness.candidates
            ) as answer:
                assert answer.status == (200 if status == 200 else 502)
        assert [r.target for r in registry.requests] == ["/query", "/query"]
    params = json.loads(harness.decode.requests[0].body)["kv_transfer_params"]
    assert params["remote_engine_id"] == "engine-p"
    assert params["transfer_id"] == prefill.requests[0].headers["x-request-id"]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_pod_that_does_not_answer_the_peer_query_is_unreachable(
    harness: Harness, status: int
) -> None:
    async def nonsense(turn: Turn) -> None:
        turn.answer(status, b"nonsense")

    prefill = await harness.prefill()
    async with Registry(nonsense) as registry:
        await with_registry(harness, registry, prefill)
        async with harness.http.post(
            harness.url(), data=BODY, headers=harness.candidates
        ) as answer:
            assert answer.status == 502
    assert prefill.requests == harness.decode.requests == []


def usage(cached: int) -> bytes:
    """An answer with a usage, and a number that only a verbatim copy keeps."""
    return b'{"usage": {"prompt_tokens_details": {"cached_tokens": %d}}, "x": 1.50}' % cached


async def prefill_with_usage(turn: Turn) -> None:
    body = usage(3)[:-1] + b', "choices": [{"finish_reason": "length"}]}'
    turn.answer(200, body)


@pytest.mark.parametrize("http10", [False, True])
async def test_the_usage_has_the_prefills_count_of_cached_tokens(
    harness: Harness, http10: bool
) -> None:
    async def decodes(turn: Turn) -> None:
        turn.answer(200, usage(9))

    await harness.prefill(prefill_with_usage)
    await harness.start(decodes, connector="offloading")
    [candidates] = [f"{k}: {v}\r\n" for k, v in harness.candidates.items()]
    version = "1.0" if http10 else "1.1"
    async with wire(harness.sidecar.listen) as client:
        head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\n{candidates}"
        client.send(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
        answer = await client.response()
    assert (answer.status, answer.body) == (200, usage(3))
    assert ("transfer-encoding" in answer.headers) is not http10


@pytest.mark.parametrize("prefill_first", [False, True])
async def test_the_usage_of_a_stream_has_the_prefills_count_too(
    harness: Harness, prefill_first: bool
) -> None:
    async def prefills(turn: Turn) -> None:
        if not prefill_first:
            await sent.wait()
        await prefill_with_usage(turn)
        prefill_answered.set()

    async def decodes(turn: Turn) -> None:
        if prefill_first:
            await prefill_answered.wait()
        turn.stream()
        turn.event('{"text": "one"}')
        turn.event(usage(9).decode())
        turn.event("[DONE]")
        turn.end()
        sent.set()

    sent, prefill_answered = asyncio.Event(), asyncio.Event()
    await harness.prefill(prefills)
    await harness.start(decodes, connector="offloading")
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        text = await answer.read()
    assert text == b'data: {"text": "one"}\n\ndata: ' + usage(3) + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    "tail", [b"", b"data: half", b"event: message_delta\n", b"event: message_delta\ndata: {}\n"]
)
@pytest.mark.parametrize("with_usage", [False, True])
async def test_a_rewritten_stream_that_is_lost_ends_in_an_error_event(
    harness: Harness, tail: bytes, with_usage: bool
) -> None:
    """`with_usage`: the prefill reports cached tokens. An open event is not sent."""

    async def decodes(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        if tail:
            turn.send(chunk(tail))
        await harness.go.wait()
        turn.die()

    await harness.prefill(prefill_with_usage if with_usage else prefilled)
    await harness.start(decodes, connector="offloading")
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        harness.go.set()
        event = await answer.content.read()
    assert json.loads(event[6:])["error"]["code"] == 502


async def test_a_rewritten_stream_that_is_lost_in_its_first_event_has_a_head(
    harness: Harness,
) -> None:
    async def decodes(turn: Turn) -> None:
        turn.stream()
        turn.send(chunk(b"event: message_start\n"))
        await turn.writer.drain()
        await harness.go.wait()
        turn.die()

    async def prefills(turn: Turn) -> None:
        await prefill_with_usage(turn)
        await turn.writer.drain()
        harness.go.set()

    await harness.prefill(prefills)
    await harness.start(decodes, connector="offloading")
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert answer.status in {200, 502}
        event = (await answer.content.read()).removeprefix(b"data: ")
    assert json.loads(event)["error"]["code"] == 502
