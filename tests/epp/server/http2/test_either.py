"""A port that serves TLS and clear text."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme

from tandem_epp.server.http2.frames import FrameType
from tandem_epp.server.http2.limits import Limits
from tandem_epp.server.http2.tls import TlsSettings, tls_context

from ...real import until
from .test_server import Serving, connected, echo, issue, serving

pytestmark = pytest.mark.component
SELF_SIGNED = TlsSettings()


async def test_gateways_of_both_kinds_and_probes_use_one_port(tmp_path: Path) -> None:
    authority = trustme.CA()
    issue(authority, tmp_path)
    root = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = tls_context(TlsSettings(directory=tmp_path))
    async with serving(tls=tls, allows_clear=True) as served, aiohttp.ClientSession() as session:
        target = f"localhost:{served.port}"
        for channel in (grpc.aio.insecure_channel(target), grpc.aio.secure_channel(target, root)):
            async with channel:
                call = echo(channel)()
                await call.write(bytes(200_000))
                assert await call.read() == bytes(200_000)
                call.cancel()
        for scheme in ("http", "https"):
            async with session.get(f"{scheme}://{target}/readyz", ssl=trusting) as answer:
                assert (answer.status, await answer.text()) == (200, "ready\n")


@pytest.mark.parametrize("start", [b"", b"\x16", b"\x16\x03\x01nothing of TLS" * 9])
async def test_a_connection_that_does_not_begin_is_closed(start: bytes) -> None:
    limits = Limits(preface_seconds=0.2)
    async with serving(limits, tls_context(SELF_SIGNED), allows_clear=True) as served:
        async with connected(served.port, start) as client:
            assert await client.ends()
        async with connected(served.port) as client:
            await client.until(FrameType.SETTINGS)


async def test_silent_connections_are_bounded_and_end_with_the_server() -> None:
    limits = Limits(connections=3, preface_seconds=600)
    async with serving(limits, tls_context(SELF_SIGNED), allows_clear=True) as served:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(4)]
        reading = [asyncio.create_task(reader.read()) for reader, _ in silent]

        async def is_refused() -> bool:
            return any(task.done() for task in reading)

        await until(is_refused)
        assert sum(task.done() for task in reading) == 1
    assert await asyncio.gather(*reading) == [b""] * 4
    for _, writer in silent:
        writer.close()


async def test_a_client_that_leaves_at_once_hurts_no_other() -> None:
    async with serving(tls=tls_context(SELF_SIGNED), allows_clear=True) as served:
        for start in (b"", b"P", b"\x16"):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(start)
            writer.transport.abort()
        async with connected(served.port) as client:
            await client.until(FrameType.SETTINGS)


async def test_a_port_in_use_is_an_error() -> None:
    tls, other = tls_context(SELF_SIGNED), Serving(Limits())
    async with serving(tls=tls, allows_clear=True) as served:
        with pytest.raises(OSError, match="in use"):
            await other.server.listen("127.0.0.1", served.port, tls, allows_clear=True)
    await other.server.stop(0)
