"""Requests that generate nothing reach the engine, and answers the client, byte for byte."""

import asyncio

import aiohttp
import pytest

from ..conftest import Harness
from ..peers import Turn, hangs
from ..wire import wire


async def echo(turn: Turn) -> None:
    """Echo the request."""
    turn.answer(200, turn.request.body, f"x-method: {turn.request.method}")


async def test_header_values_and_their_order_are_preserved(harness: Harness) -> None:
    await harness.start(echo)
    async with wire(harness.sidecar.listen) as client:
        client.send(
            b"GET /v1/models?a=%20b&&c=%C3%A4;d HTTP/1.1\r\nHost: x\r\nX-B:  Mixed Case, \xe4 \r\n"
            b'Authorization: Bearer  two  spaces\r\nX-A: 1\r\nCookie: a=b; c="d"\r\n'
            b"X-Empty:\r\n\r\n"
        )
        assert (await client.response()).status == 200
    [request] = harness.decode.requests
    assert request.target == "/v1/models?a=%20b&&c=%C3%A4;d"
    assert list(request.headers.items())[2:] == [
        ("x-b", "Mixed Case, \xe4"),
        ("authorization", "Bearer  two  spaces"),
        ("x-a", "1"),
        ("cookie", 'a=b; c="d"'),
        ("x-empty", ""),
    ]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS", "PROPFIND"])
async def test_any_method_may_have_a_body(harness: Harness, method: str) -> None:
    await harness.start()
    harness.decode.script = echo
    body = b'{ "n" : 9007199254740993.10 }' + b" " * 100_000
    async with wire(harness.sidecar.listen) as client:
        head = f"{method} /v1/responses/7 HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        for _ in range(2):
            client.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await client.response()
            assert (answer.status, answer.body) == (200, body)
            assert answer.headers["x-method"] == method


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_a_request_without_a_body_gets_none(harness: Harness, method: str) -> None:
    await harness.start(echo)
    async with wire(harness.sidecar.listen) as client:
        client.send(f"{method} /v1/models HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert (await client.response(head=method == "HEAD")).status == 200
    assert "content-length" not in harness.decode.requests[0].headers


async def test_targets_reach_the_engine_as_paths(harness: Harness) -> None:
    await harness.start(echo)
    async with wire(harness.sidecar.listen) as client:
        for line in (b"GET http://elsewhere/v1/models?x", b"GET /v1/models?//a/../b%2e"):
            client.send(line + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.response()).status == 200
    targets = [request.target for request in harness.decode.requests]
    assert targets == ["/v1/models?x", "/v1/models?//a/../b%2e"]


async def test_an_absolute_target_cannot_bypass_the_hand_off(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.post(b'{"prompt": "Hi"}', path="http://engine:8200/v1/completions")
        answer = await client.response()
    assert answer.headers["x-continuum-routing-path"] == "unified"


async def test_multipart_forms_are_not_changed(harness: Harness) -> None:
    """An audio file with a part that looks like a forbidden field."""
    await harness.start()
    harness.decode.script = echo
    form = aiohttp.FormData()
    form.add_field("file", bytes(range(256)) * 4096, filename="a.wav", content_type="audio/wav")
    form.add_field("model", "whisper")
    form.add_field("note", '{"kv_transfer_params": 1}', content_type="text/plain")
    async with harness.http.post(harness.url("/v1/audio/transcriptions"), data=form) as answer:
        assert answer.status == 200
        sent = await answer.read()
    [request] = harness.decode.requests
    assert request.body == sent
    assert request.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b'{"kv_transfer_params": 1}' in request.body


async def test_a_request_keeps_its_id(harness: Harness) -> None:
    """With --enable-request-id-headers vLLM returns the leg's id, which the sidecar made."""

    async def script(turn: Turn) -> None:
        turn.answer(200, b"{}", f"X-Request-Id: {turn.request.headers['x-request-id']}")

    await harness.start(script)
    headers = {"x-request-id": "mine"}
    async with harness.http.get(harness.url("/v1/models"), headers=headers) as answer:
        assert answer.headers.getall("x-request-id") == ["mine"]
    assert harness.decode.requests[0].headers["x-request-id"] != "mine"


async def test_files_are_not_changed(harness: Harness) -> None:
    await harness.start()
    harness.decode.script = echo
    for content_type in ("application/octet-stream", "text/plain"):
        headers, file = {"content-type": content_type}, bytes(range(256)) * 4096
        async with harness.http.post(
            harness.url("/tokenize"), data=file, headers=headers
        ) as answer:
            assert (answer.status, await answer.read()) == (200, file)


async def test_an_answer_is_relayed_in_its_original_bytes(harness: Harness) -> None:
    """Casing, order, repetitions, chunk sizes and trailers stay; hop-by-hop headers are removed."""
    body = b"4;ext=1\r\nWiki\r\n005\r\npedia\r\n0\r\nX-Checksum: abc\r\n\r\n"
    head = (
        b"X-One: 1\r\nSet-Cookie: a\r\nServer: uvicorn\r\nSet-Cookie: b\r\nTrailer: X-Checksum\r\n"
    )

    async def script(turn: Turn) -> None:
        turn.send(
            b"HTTP/1.1 299 Quite Fine\r\n" + head + b"Keep-Alive: timeout=5\r\n"
            b"x-tandem-timing: queue=1\r\nTransfer-Encoding: chunked\r\n\r\n" + body
        )

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            response = await client.reader.readuntil(b"X-Checksum: abc\r\n\r\n")
    assert response == (
        b"HTTP/1.1 299 Quite Fine\r\n" + head + b"Transfer-Encoding: chunked\r\n\r\n" + body
    )


async def test_a_large_answer_waits_for_its_reader(harness: Harness) -> None:
    size = 2**26

    async def script(turn: Turn) -> None:
        turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(64):
            turn.send(bytes(size // 64))
            await turn.writer.drain()

    await harness.start(script)
    async with wire(harness.sidecar.listen) as client:
        client.send(b"GET /v1/responses/7 HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.reader.readuntil(b"\r\n\r\n")
        remaining_bytes = size
        async with asyncio.timeout(20):
            while remaining_bytes:
                remaining_bytes -= len(await client.reader.read(2**20))


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_passthrough_to_a_hung_engine_is_given_up(
    harness: Harness, has_begun: bool
) -> None:
    async def script(turn: Turn) -> None:
        if has_begun:
            turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await turn.gone.wait()

    await harness.start(script, silence_timeout=0.2)
    harness.decode.health = hangs
    async with wire(harness.sidecar.listen) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        if has_begun:
            assert (await client.reader.readuntil(b"half")).startswith(b"HTTP/1.1 200 ")
            with pytest.raises(ConnectionResetError):
                await client.closed()
        else:
            answer = await client.response()
            assert (answer.status, b"no sign of life" in answer.body) == (502, True)
    await asyncio.wait_for(harness.sidecar.lifecycle.idle(), 10)


async def test_a_slow_answer_of_an_engine_that_answers_health_checks_is_waited_for(
    harness: Harness,
) -> None:
    checks = 0

    async def healthy(turn: Turn) -> None:
        nonlocal checks
        checks += 1
        turn.answer(200, b"")
        if checks == 5:
            probe.set()

    async def script(turn: Turn) -> None:
        await probe.wait()
        turn.answer(200, b"{}")

    probe = asyncio.Event()
    await harness.start(script, silence_timeout=0.2)
    harness.decode.health = healthy
    async with harness.http.get(harness.url("/v1/models")) as answer:
        assert answer.status == 200
