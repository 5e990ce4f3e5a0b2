"""Clients that connect over TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tandem_contract.commandline import HostPort
from tandem_contract.server_tls import ServerTls
from tandem_http1.client import Limits
from tandem_http1.messages import response_bytes

from ..wire import Wire, wire
from .serving import ReceivedRequest, serving


def unverifying() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@asynccontextmanager
async def tls_wire(address: HostPort, context: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(
        *address, ssl=context or unverifying(), server_hostname="pod.test"
    )
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def answer(request: ReceivedRequest) -> None:
    request.answer(request.request.body or b"ok")


async def test_requests_and_large_answers_on_one_connection() -> None:
    body = bytes(range(256)) * 20_000
    async with (
        serving(reply=answer, tls=ServerTls(None, ["http/1.1"])) as server,
        tls_wire(server.address) as client,
    ):
        chosen = client.writer.get_extra_info("ssl_object").selected_alpn_protocol()
        assert chosen == "http/1.1"
        for _ in range(2):
            client.post(body)
            assert (await client.response()).body == body


async def test_a_client_that_closes_is_disconnected_since_tls_has_no_half_close() -> None:
    async with serving(tls=ServerTls(None, [])) as server, tls_wire(server.address) as client:
        client.post(b"{}")
        request = await server.next()
        client.writer.close()
        async with asyncio.timeout(10):
            await request.disconnect.wait()


async def test_an_aborted_answer_is_truncated_for_the_client() -> None:
    def cut(request: ReceivedRequest) -> None:
        request.client.write(response_bytes(200, b"", b"x" * 10, close=False)[:-5])
        request.client.abort()

    async with (
        serving(reply=cut, tls=ServerTls(None, [])) as server,
        tls_wire(server.address) as client,
    ):
        client.post(b"{}")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
            await client.response()


async def test_bytes_that_are_no_handshake_close_the_connection() -> None:
    async with serving(reply=answer, tls=ServerTls(None, [])) as server:
        async with wire(server.address) as plain:
            plain.post(b"{}")
            closed = await plain.closed()
            assert b"HTTP" not in closed
        async with tls_wire(server.address) as client:
            client.post(b"{}")
            assert (await client.response()).status == 200


async def test_a_handshake_that_stops_gives_its_place_to_the_next_client() -> None:
    limits = Limits(connections=1, request_seconds=0.2)
    async with (
        serving(limits, answer, ServerTls(None, [])) as server,
        wire(server.address) as silent,
        tls_wire(server.address) as client,
    ):
        client.post(b"{}")
        assert (await client.response()).status == 200
        assert await silent.closed() == b""


async def test_a_new_certificate_serves_new_connections(tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()

    def write(ca: trustme.CA) -> None:
        issued = ca.issue_cert("pod.test")
        (tmp_path / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
        (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())

    write(first)
    tls = ServerTls(tmp_path, ["http/1.1"])
    async with serving(reply=answer, tls=tls) as server:
        trusting = {ca: ssl.create_default_context() for ca in (first, second)}
        for ca, context in trusting.items():
            ca.configure_trust(context)
        async with tls_wire(server.address, trusting[first]) as old:
            write(second)
            tls.reload()
            async with tls_wire(server.address, trusting[second]) as new:
                for client in (old, new):
                    client.post(b"{}")
                    assert (await client.response()).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            async with tls_wire(server.address, trusting[first]):
                pass
