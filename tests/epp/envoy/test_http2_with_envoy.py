"""The HTTP/2 server behind real Envoy: what only it does, and answers that pass through it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme

from tandem_epp.server.http2 import health_pb2 as pb
from tandem_epp.server.http2.health import SERVICE, SERVING
from tandem_operator.routing.envoy.clusters import EPP, TYPE, Json

from ..real import Backend, until
from ..server.http2.test_server import issue
from .test_with_envoy import at_rest, post, running

pytestmark = pytest.mark.component


def with_response_bodies(bootstrap: Json, _decode: list[Backend]) -> None:
    """Envoy sends each chunk of an answer through the EPP."""
    (listener,) = bootstrap["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (ext_proc,) = [f for f in manager["http_filters"] if f["name"].endswith("ext_proc")]
    mode = ext_proc["typed_config"]["processing_mode"]
    mode["request_body_mode"] = mode["response_body_mode"] = "FULL_DUPLEX_STREAMED"


async def test_answers_pass_through_the_epp_unchanged(tmp_path: Path) -> None:
    async with running(tmp_path, "FULL_DUPLEX_STREAMED", with_response_bodies) as stack:
        for backend in stack.decode:
            # Whole bodies: many chunks of all sizes, in parallel.
            backend.release.set()
        sizes = [0, 1, 100, 70_000, 1_000_000]
        bodies = [
            {"model": "m", "prompt": f"{n} " + "x" * size} for n, size in enumerate(sizes * 8)
        ]
        answers = await asyncio.gather(*(post(stack, body) for body in bodies))
        assert {(status, answer) for status, answer, _ in answers} == {(200, b"first last")}
        assert stack.received == len(bodies)
        await until(lambda: at_rest(stack))


async def test_bodies_in_chunks_of_few_bytes_are_no_flood(tmp_path: Path) -> None:
    """Envoy sends each piece that a client writes as a message of its own."""
    clients, chunks = 8, 2500

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "prompt": "'
        for _ in range(chunks):
            yield b"x"
            # Let Envoy read it before the next one is written.
            await asyncio.sleep(0)
        yield b'"}'

    async with running(tmp_path, "FULL_DUPLEX_STREAMED", with_response_bodies) as stack:
        for backend in stack.decode:
            backend.release.set()

        async def upload() -> tuple[int, bytes]:
            url, kind = stack.url + "/v1/completions", {"content-type": "application/json"}
            async with stack.session.post(url, data=body(), headers=kind) as answer:
                return answer.status, await answer.read()

        answers = await asyncio.gather(*(upload() for _ in range(clients)))
        assert set(answers) == {(200, b"first last")}
        figures = await stack.epp.figures()
        decisions = [v for k, v in figures.items() if k.startswith("tandem_epp_decisions_total")]
        # Envoy lets requests pass without a decision when its connection to the EPP is cut.
        assert sum(decisions) == clients
        await until(lambda: at_rest(stack))


async def test_a_slow_answer_arrives_as_it_is_generated(tmp_path: Path) -> None:
    async with (
        running(tmp_path, "FULL_DUPLEX_STREAMED", with_response_bodies) as stack,
        stack.session.post(stack.url + "/v1/responses/slow", data=b"x") as response,
    ):
        assert await response.content.readexactly(6) == b"first "
        for backend in stack.decode:
            backend.release.set()
        assert await response.content.read() == b"last"


@pytest.mark.parametrize("is_tls", [True, False], ids=["tls", "clear"])
@pytest.mark.parametrize("accepts_both", [True, False], ids=["both", "one"])
async def test_tls_between_envoy_and_the_epp(
    tmp_path: Path, is_tls: bool, accepts_both: bool
) -> None:
    authority, certificates = trustme.CA(), tmp_path / "tls"
    certificates.mkdir()
    issue(authority, certificates)
    root = tmp_path / "ca.pem"
    root.write_bytes(authority.cert_pem.bytes())

    def with_tls(bootstrap: Json, _decode: list[Backend]) -> None:
        if not is_tls:
            return
        clusters = {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}
        clusters[EPP]["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "sni": "localhost",
                "common_tls_context": {
                    "alpn_protocols": ["h2"],
                    "validation_context": {"trusted_ca": {"filename": str(root)}},
                },
            },
        }

    flags = ("--tls-dir", str(certificates)) if is_tls or accepts_both else ()
    if accepts_both:
        flags += ("--accept-tls",)
    async with running(tmp_path, "BUFFERED", with_tls, flags=flags) as stack:
        bodies = [{"model": "m", "prompt": f"{n} " + "x" * 100_000} for n in range(20)]
        answers = await asyncio.gather(*(post(stack, body) for body in bodies))
        assert {status for status, _, _ in answers} == {200}
        figures = await stack.epp.figures()
        decisions = [v for k, v in figures.items() if k.startswith("tandem_epp_decisions_total")]
        # Envoy lets requests pass without a decision when it cannot reach the EPP.
        assert sum(decisions) == len(bodies)


async def test_probes_on_the_port_of_ext_proc(tmp_path: Path) -> None:
    async with running(tmp_path, "BUFFERED") as stack:
        target = f"127.0.0.1:{stack.epp.grpc}"
        async with aiohttp.ClientSession() as session:
            for path in ("/healthz", "/readyz"):
                async with session.get(f"http://{target}{path}") as response:
                    assert response.status == 200
        async with grpc.aio.insecure_channel(target) as channel:
            check = channel.unary_unary(
                f"/{SERVICE}/Check",
                request_serializer=pb.HealthCheckRequest.SerializeToString,
                response_deserializer=pb.HealthCheckResponse.FromString,
            )
            assert (await check(pb.HealthCheckRequest())).status == SERVING
