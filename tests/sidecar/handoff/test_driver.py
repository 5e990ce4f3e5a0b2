"""Each failure of a hand-off, over real sockets."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import aiohttp
import pytest

from tandem_sidecar.settings import Policy

from ..conftest import Harness
from ..peers import PARAMS, Script, Turn
from ..wire import wire

BODY = (
    b'{"model": "m", "prompt": "Hi", "seed": 9007199254740993,  "zeta": [1.0, 2e5], "alpha": null}'
)
STREAM = b'{"model":"m","prompt":"Hi","stream":true}'
PATH = "X-Continuum-Routing-Path"


async def test_split_hands_the_producers_object_over_verbatim(harness: Harness) -> None:
    prefill = await harness.prefill()
    await harness.start()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 200
        assert await answer.json() == {"choices": [{"text": "hello"}]}
        assert answer.headers[PATH] == "prefill_then_decode"
        assert answer.headers["X-Continuum-Prefill-Backend"] == str(prefill.address)
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-0"
    [sent] = harness.decode.requests
    assert sent.body == BODY[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    [leg] = prefill.requests
    assert leg.json["max_tokens"] == leg.json["min_tokens"] == 1
    assert b'"seed":9007199254740993' in leg.body
    assert leg.headers["x-request-id"] == sent.headers["x-request-id"]
    assert (
        await harness.metric('disaggregated_requests_total{routing_path="prefill_then_decode"}')
        == 1
    )
    assert await harness.metric("disaggregated_kv_transfer_duration_seconds_sum") == 0.125
    assert await harness.metric("tandem_sidecar_in_flight") == 0


async def refused(turn: Turn) -> None:
    turn.die()


async def server_error(turn: Turn) -> None:
    turn.answer(500, b'{"error": {"message": "engine trouble"}}')


async def busy(turn: Turn) -> None:
    turn.answer(429, b"{}")


async def unavailable(turn: Turn) -> None:
    turn.answer(503, b"{}")


async def garbage(turn: Turn) -> None:
    turn.send(b"not http at all\r\n\r\n")


async def silent(turn: Turn) -> None:
    await turn.gone.wait()


FAILING = [refused, server_error, busy, unavailable, garbage]


@pytest.mark.parametrize("script", FAILING)
async def test_failed_prefill_goes_to_the_next_candidate(harness: Harness, script: Script) -> None:
    await harness.prefill(script)
    second = await harness.prefill()
    await harness.start()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 200
        assert answer.headers[PATH] == "prefill_then_decode"
        assert answer.headers["X-Continuum-Prefill-Backend"] == str(second.address)
    ids = {harness.prefills[0].requests[0].headers["x-request-id"]}
    ids.add(second.requests[0].headers["x-request-id"])
    assert len(ids) == 2, "each attempt has its own engine id"
    assert harness.decode.requests[0].headers["x-request-id"] in ids
    assert await harness.metric('disaggregated_errors_total{phase="prefill"}') == 1
    assert await harness.metric("tandem_sidecar_retries_total") == 1
    assert await harness.metric("disaggregated_fallback_total") == 0


@pytest.mark.parametrize("script", FAILING)
async def test_failed_prefill_without_another_falls_back(harness: Harness, script: Script) -> None:
    await harness.prefill(script)
    await harness.start()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 200
        assert answer.headers[PATH] == "fallback"
        assert "X-Continuum-Prefill-Backend" not in answer.headers
    assert harness.decode.requests[0].body == BODY
    assert await harness.metric("disaggregated_fallback_total") == 1
    assert await harness.metric('disaggregated_requests_total{routing_path="fallback"}') == 1


@pytest.mark.parametrize("script", [refused, server_error, garbage])
async def test_failed_prefill_without_fallback_is_a_502(harness: Harness, script: Script) -> None:
    prefill = await harness.prefill(script)
    await harness.start(policy=Policy(fallback_to_unified=False))
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.status == 502
        error = (await answer.json())["error"]
        assert error["code"] == 502
        assert str(prefill.address) in error["message"]
        assert answer.headers[PATH] == "prefill_then_decode"
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-0"
        assert answer.headers["x-request-id"]
    assert harness.decode.requests == []


async def test_unreachable_prefill_goes_to_the_next_candidate(harness: Harness) -> None:
    first = await harness.prefill()
    await harness.prefill()
    await harness.start()
    first.close_port()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "prefill_then_decode")


async def test_retries_bound_the_candidates_asked(harness: Harness) -> None:
    for _ in range(4):
        await harness.prefill(server_error)
    await harness.start(retries=1)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert answer.headers[PATH] == "fallback"
    assert [len(p.requests) for p in harness.prefills] == [1, 1, 0, 0]


@pytest.mark.parametrize("fallback", [True, False])
async def test_silent_prefill_is_left_at_the_deadline(harness: Harness, fallback: bool) -> None:
    disconnect = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    prefill = await harness.prefill(script)
    await harness.start(policy=Policy(fallback), prefill_timeout=0.2)
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        expected = (200, "fallback") if fallback else (504, "prefill_then_decode")
        assert (answer.status, answer.headers[PATH]) == expected
    if prefill.requests:  # a busy machine may not get as far within the deadline
        await asyncio.wait_for(disconnect.wait(), 10)


@pytest.mark.parametrize(
    "params",
    [
        b"null",
        b"{}",
        b"[1]",
        PARAMS.replace(b"true", b"false", 1),
        PARAMS.replace(b"5600", b"null"),
        PARAMS.replace(b"127.0.0.1", b"127.0.0.\xff"),
        PARAMS[:-1] + b',"transfer_mode": 5}',
        PARAMS[:-1] + b',"transfer_mode": "\xff"}',
    ],
)
async def test_unusable_transfer_params_fall_back(harness: Harness, params: bytes) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(200, b'{"kv_transfer_params": ' + params + b"}")

    await harness.prefill(script)
    await harness.start()
    async with harness.http.post(harness.url(), data=BODY, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
    assert harness.decode.requests[0].body == BODY
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1


async def kv_load_error(turn: Turn) -> None:
    turn.answer(500, b'{"error": {"message": "KV load failure"}}')


async def kv_load_error_in_stream(turn: Turn) -> None:
    turn.stream()
    turn.event('{"error": {"message": "KV load failure", "code": 500}}')
    turn.event("[DONE]")
    turn.end()


@pytest.mark.parametrize("failure", [kv_load_error, kv_load_error_in_stream])
async def test_failed_kv_load_is_retried_locally(harness: Harness, failure: Script) -> None:
    async def script(turn: Turn) -> None:
        if "kv_transfer_params" in turn.request.json:
            await failure(turn)
        else:
            await harness.decode.complete(turn)

    await harness.prefill()
    await harness.start(script)
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert (answer.status, answer.headers[PATH]) == (200, "fallback")
        assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert harness.decode.requests[1].body == STREAM
    await asyncio.wait_for(harness.decode.released.wait(), 10)
    assert await harness.metric('disaggregated_errors_total{phase="kv_transfer"}') == 1
    assert await harness.metric("tandem_sidecar_retries_total") == 1


async def test_an_engine_error_of_a_single_engine_request_is_forwarded(harness: Harness) -> None:
    await harness.start(server_error)
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert (answer.status, answer.headers[PATH]) == (500, "unified")
        assert (await answer.json())["error"]["message"] == "engine trouble"
    assert len(harness.decode.requests) == 1
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') == 1


@pytest.mark.parametrize("split", [True, False])
async def test_decode_dying_before_the_first_byte_is_a_502(harness: Harness, split: bool) -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        await turn.writer.drain()
        turn.die()

    await harness.prefill()
    await harness.start(script)
    headers = harness.candidates if split else {}
    async with harness.http.post(harness.url(), data=STREAM, headers=headers) as answer:
        assert answer.status == 502
        assert answer.headers[PATH] == ("prefill_then_decode" if split else "unified")
    assert await harness.metric('disaggregated_errors_total{phase="decode"}') == 1


async def test_unreachable_decode_is_a_502(harness: Harness) -> None:
    await harness.start()
    harness.decode.close_port()
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert answer.status == 502


@pytest.mark.parametrize("tail", [b"", b'20\r\ndata: {"text": "half an ev'])
async def test_decode_dying_in_mid_stream_ends_in_an_error_event(
    harness: Harness, tail: bytes
) -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        turn.send(tail)
        await turn.writer.drain()
        await harness.go.wait()
        turn.die()

    await harness.prefill()
    await harness.start(script)
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        assert await answer.content.readuntil(b"\n\n") == b"data: first\n\n"
        harness.go.set()
        event = await answer.content.read()
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["code"] == 502
    assert b"half" not in event


@pytest.mark.parametrize("split", [True, False])
async def test_a_connection_serves_the_next_request_after_a_stream_was_cut(
    harness: Harness, split: bool
) -> None:
    """The head promised a reusable connection: the client may send its next request at once."""

    async def script(turn: Turn) -> None:
        if b"stream" not in turn.request.body:
            await harness.decode.complete(turn)
            return
        turn.stream()
        turn.event("first")
        await turn.writer.drain()
        await harness.go.wait()
        turn.die()

    await harness.prefill()
    await harness.start(script)
    lines = [f"{k}: {v}" for k, v in harness.candidates.items()] if split else []
    async with wire(harness.sidecar.listen) as client:
        client.post(STREAM, *lines)
        client.post(BODY, *lines)
        await harness.decode.received(1)
        harness.go.set()
        broken, complete = await client.response(), await client.response()
    assert broken.headers.get("connection") != "close"
    assert broken.body.startswith(b"data: first\n\n")
    assert json.loads(broken.body.removeprefix(b"data: first\n\ndata: "))["error"]["code"] == 502
    assert (complete.status, json.loads(complete.body)) == (200, {"choices": [{"text": "hello"}]})


@pytest.mark.parametrize("tail", [b"", b"data: second"])
async def test_a_stream_that_is_cut_within_a_chunk_stays_incomplete_and_closes(
    harness: Harness, tail: bytes
) -> None:
    """The client may take the error event for payload, but it notices the end of the connection."""
    first = b"data: first\r\n\r\n"

    async def script(turn: Turn) -> None:
        turn.stream()
        turn.send(b"400\r\n" + first + tail)
        await turn.writer.drain()
        await harness.go.wait()
        turn.die()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(STREAM)
        await client.reader.readuntil(first)
        harness.go.set()
        assert b"0\r\n\r\n" not in await client.closed()


async def test_a_stream_with_a_malformed_chunk_ends_in_an_error_event(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await turn.writer.drain()
        await harness.go.wait()
        turn.send(b"no chunk size\r\n")

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.post(STREAM)
        await client.reader.readuntil(b"data: first\n\n\r\n")
        harness.go.set()
        remainder = await client.closed()
    assert b"data: {" in remainder
    assert b"0\r\n\r\n" not in remainder, "the connection closes, so the body must stay incomplete"


@pytest.mark.parametrize("framing", ["transfer-encoding: chunked", "content-length: 100"])
async def test_decode_dying_in_a_plain_answer_breaks_the_connection(
    harness: Harness, framing: str
) -> None:
    async def script(turn: Turn) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        turn.send(head.encode() + b'4\r\n{"a"\r\n')
        await turn.writer.drain()
        await harness.go.wait()
        turn.die()

    await harness.start(script)
    async with harness.http.post(harness.url(), data=BODY) as answer:
        assert await answer.content.readany()
        harness.go.set()
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
            await answer.content.read()


async def leave(
    harness: Harness, body: bytes, headers: dict[str, str], condition: Awaitable[Any]
) -> None:
    """Post, wait for `condition`, and close the connection."""
    _, writer = await asyncio.open_connection(*harness.sidecar.listen)
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await asyncio.wait_for(condition, 10)
    writer.close()
    await writer.wait_closed()


async def test_client_leaving_during_prefill_aborts_it(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    prefill = await harness.prefill(script)
    await harness.start()
    await leave(harness, BODY, harness.candidates, prefill.received(1))
    await asyncio.wait_for(disconnect.wait(), 10)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert harness.decode.requests == harness.decode.releases == []


async def test_client_leaving_before_admission_releases_the_kv(harness: Harness) -> None:
    disconnect = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.gone.wait()
        disconnect.set()

    await harness.prefill()
    await harness.start(script)
    await leave(
        harness,
        BODY,
        harness.candidates | {"authorization": "Bearer k"},
        harness.decode.received(1),
    )
    await asyncio.wait_for(disconnect.wait(), 10)
    await asyncio.wait_for(harness.decode.released.wait(), 10)
    [release] = harness.decode.releases
    assert release.target == "/v1/completions"
    assert release.headers["authorization"] == "Bearer k"
    assert PARAMS in release.body
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    path = 'disaggregated_requests_total{routing_path="prefill_then_decode"}'
    assert await harness.metric(path) == 1


async def test_client_leaving_a_stream_aborts_decode_and_releases_nothing(harness: Harness) -> None:
    disconnect, started = asyncio.Event(), asyncio.Event()

    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        started.set()
        await turn.gone.wait()
        disconnect.set()

    await harness.prefill()
    await harness.start(script)

    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        await answer.content.readuntil(b"\n\n")
        answer.close()
    await asyncio.wait_for(disconnect.wait(), 10)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)
    assert harness.decode.releases == []


async def test_a_slow_client_slows_the_engine_down(harness: Harness) -> None:
    """The engine cannot write the whole answer before the client reads it."""
    total, piece = 64 * 2**20, b"x" * 2**16
    sent = 0
    stalled = asyncio.Event()

    async def script(turn: Turn) -> None:
        nonlocal sent
        turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            turn.send(piece)
            sent += len(piece)
            try:
                await asyncio.wait_for(turn.writer.drain(), 0.5)
            except TimeoutError:
                stalled.set()
                await turn.writer.drain()

    await harness.start(script)
    async with harness.http.post(harness.url(), data=BODY) as answer:
        await asyncio.wait_for(stalled.wait(), 20)
        assert sent < total
        received = 0
        async for part in answer.content.iter_chunked(2**20):
            received += len(part)
    assert received == total


async def test_stream_passes_through_byte_for_byte(harness: Harness) -> None:
    await harness.prefill()
    await harness.start()
    async with harness.http.post(harness.url(), data=STREAM, headers=harness.candidates) as answer:
        text = await answer.text()
    assert text == 'data: {"text": "one"}\n\ndata: {"text": "two"}\n\ndata: [DONE]\n\n'
    assert harness.decode.requests[0].body.startswith(STREAM[:-1])


async def test_internal_headers_of_engines_and_clients_are_replaced(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        turn.answer(
            200,
            b"{}",
            "X-Continuum-Routing-Path: fast_decode",
            "x-tandem-timing: queue=1",
            "x-request-id: engine",
            "x-other: kept",
        )

    await harness.start(script)
    sent = {"x-data-parallel-rank": "3", "x-tandem-timing": "queue=9", "x-request-id": "mine"}
    async with harness.http.post(harness.url(), data=BODY, headers=sent) as answer:
        assert answer.headers.getall(PATH) == ["unified"]
        assert answer.headers.getall("x-request-id") == ["mine"]
        assert answer.headers["x-other"] == "kept"
        assert "x-tandem-timing" not in answer.headers, "no router is there to remove it"
    engine_headers = harness.decode.requests[0].headers
    assert engine_headers["x-request-id"].startswith("mine-")
    assert not {"x-data-parallel-rank", "x-tandem-timing"} & set(engine_headers)


async def test_concurrent_hand_offs_stay_apart(harness: Harness) -> None:
    async def script(turn: Turn) -> None:
        prompt = turn.request.json["prompt"]
        turn.answer(200, json.dumps({"prompt": prompt}).encode())

    await harness.prefill()
    await harness.start(script)

    async def is_answered(i: int) -> bool:
        body = json.dumps({"prompt": f"p{i}"})
        async with harness.http.post(
            harness.url(), data=body, headers=harness.candidates
        ) as answer:
            return bool((await answer.json())["prompt"] == f"p{i}")

    assert all(await asyncio.gather(*(is_answered(i) for i in range(100))))
    ids = [r.headers["x-request-id"] for r in harness.decode.requests]
    assert len(set(ids)) == 100


async def test_one_line_for_each_failed_attempt_and_no_prompt(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        await harness.prefill(server_error)
    await harness.start()
    headers = harness.candidates | {"x-request-id": "r1"}
    async with harness.http.post(
        harness.url(), data=b'{"prompt":"SECRET"}', headers=headers
    ) as answer:
        assert answer.status == 200
    lines = [record for record in caplog.records if record.name.startswith("tandem_sidecar")]
    assert len(lines) == 2
    for line, peer in zip(lines, harness.prefills, strict=True):
        assert vars(line)["request_id"] == "r1"
        assert str(peer.address) in line.getMessage()
        assert "SECRET" not in str(vars(line))
