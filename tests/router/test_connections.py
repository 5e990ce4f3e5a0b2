"""Connections: TLS to backends and to clients, websockets, limits, what passes through."""

import ssl
from pathlib import Path

import aiohttp
import trustme

from tandem_contract.server_tls import CERTIFICATE, KEY
from tandem_http1.client import Limits
from tandem_sidecar.security.credentials import ListenTls, Tls
from tandem_sidecar.settings import Settings

from ..sidecar.peers import FakeDecode, FakePrefill, Turn
from ..sidecar.wire import wire
from .conftest import LOOPBACK, PATH, Harness


def server_context(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


async def test_backends_with_https_urls_are_verified_by_name(
    harness: Harness, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, peer, role in (("p", FakePrefill(), "prefill"), ("d", FakeDecode(), "decode")):
        peer.tls = server_context(authority, "localhost")
        await harness.add(name, peer, role=role)
        harness.backends[-1]["url"] = f"https://localhost:{peer.address.port}"
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, tls=Tls(ca=tmp_path / "ca.pem"))
    await harness.start(settings=settings)
    response, _ = await harness.ask()
    assert (response.status, response.headers[PATH]) == (200, "prefill_then_decode")


async def test_a_backend_of_another_name_gets_no_request(harness: Harness, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    peer = FakeDecode()
    peer.tls = server_context(authority, "other.test")
    await harness.add("u", peer)
    harness.backends[-1]["url"] = f"https://localhost:{peer.address.port}"
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, tls=Tls(ca=tmp_path / "ca.pem"))
    await harness.start(settings=settings)
    response, _ = await harness.ask()
    assert response.status >= 500
    assert not peer.requests


async def test_clients_may_connect_over_tls(harness: Harness, tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    pair.cert_chain_pems[0].write_to_path(tmp_path / CERTIFICATE)
    pair.private_key_pem.write_to_path(tmp_path / KEY)
    await harness.unified("u")
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, listen_tls=ListenTls(tmp_path))
    await harness.start(settings=settings)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    url = f"https://localhost:{harness.router.listen.port}/v1/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"model": "m", "prompt": "Hi"}, ssl=trusting) as answer,
    ):
        assert answer.status == 200


async def test_a_websocket_reaches_its_engine(harness: Harness) -> None:
    async def echoes(turn: Turn) -> None:
        turn.send(
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\n"
            b"upgrade: websocket\r\n\r\nfrom the engine"
        )
        await turn.gone.wait()

    engine = await harness.unified("u")
    engine.script = echoes
    await harness.start()
    async with wire(harness.router.listen) as client:
        client.send(
            b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
        )
        answer = await client.response()
        assert answer.status == 101
        assert await client.reader.readexactly(15) == b"from the engine"


async def test_a_body_above_the_limit_is_refused(harness: Harness) -> None:
    decode = await harness.unified("u")
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, limits=Limits(body=1000))
    await harness.start(settings=settings)
    response, _ = await harness.ask({"model": "m", "prompt": "x" * 1000})
    assert response.status == 413
    assert not decode.requests


async def test_other_requests_of_the_api_pass_through(harness: Harness) -> None:
    decode = await harness.unified("u")
    await harness.start()
    for path in ("/v1/embeddings", "/tokenize", "/rerank"):
        response, _ = await harness.ask({"model": "m", "input": "Hi"}, path)
        assert response.status == 200
        assert PATH not in response.headers
    async with harness.http.get(harness.url("/v1/models")) as answer:
        assert answer.status == 200
    assert [request.target for request in decode.requests] == [
        "/v1/embeddings",
        "/tokenize",
        "/rerank",
        "/v1/models",
    ]


async def test_a_request_that_is_refused_after_its_choice_counts_on_no_backend(
    harness: Harness,
) -> None:
    engine = await harness.unified("u")
    await harness.start()
    async with wire(harness.router.listen) as client:
        client.send(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        answer = await client.response()
    assert answer.status == 400
    assert not engine.requests
    (pod,) = harness.router.components.decisions.fleet
    assert pod.in_flight == 0


async def test_a_large_prompt_is_read_by_another_process(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    response, _ = await harness.ask({"model": "m", "prompt": "word " * 200_000})
    assert (response.status, response.headers[PATH]) == (200, "prefill_then_decode")
    assert await harness.metric("tandem_epp_decisions_total") == 1
