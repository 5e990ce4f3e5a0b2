"""Every combination of body modes behind real Envoy, with and without bodies and trailers."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from hpack import Decoder

from tandem_contract import headers as wire
from tandem_epp.server.http2.frames import HEADER, FrameType
from tandem_operator.routing.envoy.clusters import Json

from ..real import Backend, until
from ..server.http2 import client
from .test_with_envoy import COMPLETIONS, Stack, at_rest, post, running

pytestmark = pytest.mark.component

REQUEST_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")
RESPONSE_MODES = ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")


@pytest.mark.parametrize("response_mode", RESPONSE_MODES)
@pytest.mark.parametrize("request_mode", REQUEST_MODES)
async def test_requests_pass_and_are_placed(
    tmp_path: Path, request_mode: str, response_mode: str
) -> None:
    def change(bootstrap: Json, _decode: list[Backend]) -> None:
        (listener,) = bootstrap["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_protocol_options"] = {"enable_trailers": True}
        (ext_proc,) = [f for f in manager["http_filters"] if f["name"].endswith("ext_proc")]
        mode = ext_proc["typed_config"]["processing_mode"]
        mode["request_body_mode"], mode["response_body_mode"] = request_mode, response_mode
        # Where a route may retry, Envoy 1.40 sends a body with trailers a second time, in all modes
        # but BUFFERED: it keeps what has passed, and ext_proc continues with that after trailers.
        if request_mode != "BUFFERED":
            for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
                route.get("route", {}).pop("retry_policy", None)

    async with running(tmp_path, "BUFFERED", change) as stack:
        prompt = {"model": "m", "prompt": "word " * 30_000}
        answers = await asyncio.gather(
            post(stack, {"model": "m", "prompt": "short"}),
            post(stack, prompt),
            _send(stack, "GET", "/v1/models", b""),
            _send(stack, "POST", "/v1/completions", b""),
            _with_trailers(stack, b'{"model": "m", "prompt": "trailers"}'),
            _with_trailers(stack, b""),
            _with_http2_trailers(stack, b'{"model": "m", "prompt": "HTTP/2"}'),
            _with_http2_trailers(stack, b""),
        )
        statuses = [answer[0] for answer in answers]
        reads_bodies = request_mode in ("BUFFERED", "FULL_DUPLEX_STREAMED")
        # An empty body is no JSON: refused where the body is read and has arrived.
        assert [s for n, s in enumerate(statuses) if n not in (3, 5, 7)] == [200] * 5
        assert {statuses[n] for n in (3, 5, 7)} <= {200, 400}
        bodies = [request.body for backend in stack.decode for request in backend.received]
        assert len(bodies) == statuses.count(200), "nothing is sent twice"
        assert json.dumps(prompt).encode() in bodies
        assert b'{"model": "m", "prompt": "trailers"}' in bodies
        assert b'{"model": "m", "prompt": "HTTP/2"}' in bodies
        for backend in stack.decode:
            for request in backend.received:
                # Envoy used the pod that the EPP chose.
                assert request.headers[wire.DESTINATION_ENDPOINT].startswith(
                    f"127.0.0.1:{backend.port}"
                )
        figures = await stack.epp.figures()
        split = [v for k, v in figures.items() if k.startswith("tandem_epp_decisions_total{path=")]
        assert sum(split) == len(answers)
        assert reads_bodies == any(
            wire.PREFILLER_HOST_PORT in r.headers for b in stack.decode for r in b.received
        )
        await until(lambda: at_rest(stack))


async def test_http2_trailers_behind_the_operators_envoy(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED") as stack:
        body = json.dumps({"model": "m", "prompt": "word " * 4000}).encode()
        answers = await asyncio.gather(*(_with_http2_trailers(stack, body) for _ in range(8)))
        assert answers == [(200, b"first last")] * 8
        upload = bytes(range(256)) * 100
        path = "/v1/audio/transcriptions"
        answers = await asyncio.gather(
            *(_with_http2_trailers(stack, upload, path) for _ in range(8))
        )
        assert answers == [(200, b"first last")] * 8
        bodies = [r.body for each in stack.decode for r in each.received]
        assert sorted(bodies) == sorted([body] * 8 + [upload] * 8), "nothing is sent twice"
        await until(lambda: at_rest(stack))


async def _send(stack: Stack, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    headers = {"content-type": "application/json"}
    data = io.BytesIO(body) if body else None
    async with stack.session.request(
        method, stack.url + path, data=data, headers=headers
    ) as response:
        return response.status, await response.read()


async def _with_trailers(stack: Stack, body: bytes) -> tuple[int, bytes]:
    """A chunked request by HTTP/1.1 with a trailer, which aiohttp cannot send."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, body[n : n + 1]) for n in range(len(body)))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\ntrailer: x-checksum\r\nconnection: close\r\n\r\n"
        + chunks
        + b"0\r\nx-checksum: 1\r\n\r\n"
    )
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


async def _with_http2_trailers(
    stack: Stack, body: bytes, path: str = COMPLETIONS
) -> tuple[int, bytes]:
    """A request by HTTP/2 with a trailer; status and body of the answer."""
    host, _, port = stack.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/json",
    }
    frames = [client.START, client.headers(1, client.block(fields))]
    frames += [client.data(1, body[n : n + 9000]) for n in range(0, len(body), 9000)]
    frames.append(client.headers(1, client.block({"x-checksum": "1"}), end=True))
    writer.write(b"".join(frames))
    decoder, status, answer = Decoder(), 0, b""
    while True:
        head = await reader.readexactly(HEADER.size)
        high, low, *_ = HEADER.unpack(head)
        (frame,) = client.parse(head + await reader.readexactly(high << 8 | low))
        assert frame.kind not in (FrameType.RST_STREAM, FrameType.GOAWAY), frame
        if frame.kind is FrameType.HEADERS:
            status = int(dict(decoder.decode(frame.payload)).get(":status", status))
        elif frame.kind is FrameType.DATA:
            answer += frame.payload
        if frame.is_end:
            writer.close()
            return status, answer
