"""The EPP answers agentgateway's messages, over TLS."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import trustme

from tandem_contract import headers as wire
from tests.epp.envoy.test_with_envoy import COMPLETIONS, LONG, SCORERS, router_yaml
from tests.epp.real import Backend, Epp, epp, serving, until
from tests.epp.server.http2.test_server import issue

from .agentgateway import channel, completion, exchange

pytestmark = pytest.mark.component


@asynccontextmanager
async def picker(folder: Path) -> AsyncIterator[tuple[Epp, grpc.aio.Channel, list[Backend]]]:
    """An EPP for two decode pods and one prefill pod, the last, and a connection to it."""
    authority = trustme.CA()
    issue(authority, folder)
    backends = [Backend("decode-1"), Backend("decode-2"), Backend("prefill-1")]
    async with serving(*backends):
        config = folder / "router.yaml"
        config.write_text(router_yaml(backends[:2], backends[2], SCORERS))
        async with (
            epp(config, "--tls-dir", str(folder)) as running,
            channel(running.grpc, authority.cert_pem.bytes()) as connection,
        ):
            await until(lambda: running.serves("decode-1", "decode-2", "prefill-1"))
            yield running, connection, backends


@pytest.mark.parametrize("trailers", [False, True])
async def test_a_request_is_split_and_its_answer_passes_at_once(
    tmp_path: Path, trailers: bool
) -> None:
    async with picker(tmp_path) as (running, connection, backends):
        body = completion(LONG * 100)
        chunks = [body[i : i + 16_384] for i in range(0, len(body), 16_384)]
        stream = exchange(connection)
        request = await stream.request(COMPLETIONS, chunks, trailers=trailers)
        assert request.body == body
        decode = {("127.0.0.1", backend.port): backend for backend in backends[:2]}
        assert request.destination in decode
        assert request.headers[wire.PREFILLER_HOST_PORT] == f"127.0.0.1:{backends[2].port}"

        # Another endpoint than the picked one answers: it counts there.
        (other,) = decode.keys() - {request.destination}
        events = [f"data: {n}\n\n".encode() for n in range(5)]
        assert await stream.respond(f"{other[0]}:{other[1]}", events) == b"".join(events)
        figures = await running.figures()
        assert figures[f'tandem_epp_in_flight{{backend="{decode[other].name}"}}'] == 1


async def test_a_request_without_a_body(tmp_path: Path) -> None:
    async with picker(tmp_path) as (_, connection, backends):
        request = await exchange(connection).request("/v1/models", [])
        assert request.destination in {("127.0.0.1", each.port) for each in backends[:2]}


async def test_a_refused_request_gets_the_epps_answer(tmp_path: Path) -> None:
    async with picker(tmp_path) as (_, connection, _):
        request = await exchange(connection).request(COMPLETIONS, [completion("x", "other")])
        assert request.immediate is not None
        assert request.immediate.status.code == 404
        assert json.loads(request.immediate.body)["error"]["param"] == "model"
