"""Refused generations count as orchestration errors, and say path and request id."""

import pytest

from tandem_contract import headers
from tandem_contract.commandline import HostPort
from tandem_http1.client import Limits
from tandem_local.ports import free_port

from ..conftest import Harness
from ..peers import Turn
from ..wire import wire

COUNT = 'disaggregated_errors_total{phase="orchestration"}'
POST = b"POST %b HTTP/1.1\r\nhost: x\r\nx-request-id: r-1\r\ncontent-type: application/json\r\n"
REFUSED = {
    "not JSON": (b"content-length: 1\r\n\r\n{", 400),
    "too large": (b"content-length: 9999\r\n\r\n", 413),
    "too large, in chunks": (
        b"transfer-encoding: chunked\r\n\r\n3ff\r\n" + b"x" * 1023 + b"\r\n3ff\r\n" + b"x" * 9,
        413,
    ),
    "coded": (b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", 415),
    "transfer coding": (b"transfer-encoding: gzip, chunked\r\n\r\n", 501),
}


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/responses", b"/v1/messages"])
@pytest.mark.parametrize("reason", REFUSED)
async def test_refusals_of_generations(harness: Harness, path: bytes, reason: str) -> None:
    await harness.start(limits=Limits(body=1024))
    rest, status = REFUSED[reason]
    async with wire(harness.sidecar.listen) as client:
        client.send(POST % path + rest)
        answer = await client.response()
    assert answer.status == status
    assert answer.headers["x-continuum-routing-path"] == "unified"
    assert answer.headers["x-continuum-decode-backend"] == "decode-0"
    assert answer.headers["x-request-id"] == "r-1"
    assert await harness.metric(COUNT) == 1
    assert harness.decode.requests == []


ALTERNATE = {headers.ALTERNATE_ENDPOINT: "10.0.0.2:8000"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("case", ["engine down", "prefilled, engine down", "draining"])
async def test_what_no_engine_got_is_told_where_another_pod_may_serve_it(
    harness: Harness, path: str, case: str
) -> None:
    if case == "prefilled, engine down":
        await harness.prefill()
    await harness.start(engine=HostPort("127.0.0.1", free_port("127.0.0.1")))
    harness.sidecar.lifecycle.draining = case == "draining"
    candidates = harness.candidates if harness.prefills else {}
    for alternate in (ALTERNATE, {}):
        sent = {**candidates, **alternate}
        url, body = harness.url(path), b'{"model": "m", "prompt": "Hi"}'
        async with harness.http.post(url, data=body, headers=sent) as answer:
            assert answer.status == (503 if case == "draining" else 502)
            assert answer.headers.get(headers.NOT_SENT) == ("1" if alternate else None)


@pytest.mark.parametrize("split", [True, False])
async def test_what_an_engine_may_have_read_is_not_told_as_unsent(
    harness: Harness, split: bool
) -> None:
    async def dies(turn: Turn) -> None:
        turn.die()

    if split:
        await harness.prefill()
    await harness.start(dies)
    sent = {**(harness.candidates if split else {}), **ALTERNATE}
    body = b'{"model": "m", "prompt": "Hi"}'
    async with harness.http.post(harness.url(), data=body, headers=sent) as answer:
        assert answer.status == 502
        assert headers.NOT_SENT not in answer.headers
    assert harness.decode.requests


async def test_a_previous_response_that_is_no_text(harness: Harness) -> None:
    await harness.start()
    body = b'{"model": "m", "input": "Hi", "previous_response_id": "\xff"}'
    async with harness.http.post(harness.url("/v1/responses"), data=body) as answer:
        assert answer.status == 400
    assert await harness.metric(COUNT) == 1
    assert harness.decode.requests == []


async def test_refusals_of_a_draining_pod(harness: Harness) -> None:
    await harness.start()
    harness.sidecar.lifecycle.draining = True
    async with wire(harness.sidecar.listen) as client:
        client.post(b'{"prompt": "Hi"}')
        answer = await client.response()
    assert (answer.status, answer.headers["x-continuum-routing-path"]) == (503, "unified")
    assert len(answer.headers["x-request-id"]) == 32
    assert await harness.metric(COUNT) == 1


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/not/served"])
async def test_other_refusals_have_no_path(harness: Harness, path: bytes) -> None:
    await harness.start(limits=Limits(body=1024))
    async with wire(harness.sidecar.listen) as client:
        client.send(POST % path + b"content-length: 9999\r\n\r\n")
        answer = await client.response()
    assert (answer.status, "x-continuum-routing-path" in answer.headers) == (413, False)
    assert await harness.metric(COUNT) == 0


async def test_a_head_that_cannot_be_read_is_no_generation(harness: Harness) -> None:
    await harness.start()
    async with wire(harness.sidecar.listen) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nbad header\r\n\r\n")
        assert (await client.response()).status == 400
    assert await harness.metric(COUNT) == 0
