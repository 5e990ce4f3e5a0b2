"""TLS of servers: self-signed certificates, and certificates of a directory that changes."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from tandem_contract.server_tls import BadServerCertificate, ServerTls, self_signed_pem

HOST = "engine.test"


def write(
    directory: Path, ca: trustme.CA, key_type: trustme.KeyType = trustme.KeyType.ECDSA
) -> None:
    issued = ca.issue_cert(HOST, key_type=key_type)
    (directory / "tls.crt").write_bytes(b"".join(c.bytes() for c in issued.cert_chain_pems))
    (directory / "tls.key").write_bytes(issued.private_key_pem.bytes())


async def handshake(tls: ServerTls, client: ssl.SSLContext) -> tuple[bytes | None, str | None]:
    """The certificate and the protocol that a new connection gets."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls.context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client, server_hostname=HOST
            )
            connection = writer.get_extra_info("ssl_object")
            result = connection.getpeercert(True), connection.selected_alpn_protocol()
            await reader.read()
            writer.close()
    return result


def trusting(ca: trustme.CA, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def unverifying() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def test_a_self_signed_certificate_encrypts_and_cannot_be_verified() -> None:
    tls = ServerTls(None, ["http/1.1"])
    certificate, _ = await handshake(tls, unverifying())
    assert certificate is not None
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(tls, ssl.create_default_context())
    first = tls.context
    tls.reload()  # keeps it: clients may have pinned it
    assert tls.context is first
    assert self_signed_pem() != self_signed_pem()


async def test_a_certificate_of_a_directory_is_verified_and_alpn_is_answered(
    tmp_path: Path,
) -> None:
    ca = trustme.CA()
    write(tmp_path, ca)
    tls = ServerTls(tmp_path, ["h2", "http/1.1"])
    assert (await handshake(tls, trusting(ca, "http/1.1", "h2")))[1] == "h2"
    assert (await handshake(tls, trusting(ca)))[1] is None


async def test_a_changed_certificate_serves_new_connections_even_with_another_type_of_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ca = trustme.CA()
    write(tmp_path, ca)
    tls = ServerTls(tmp_path, [])
    before, _ = await handshake(tls, trusting(ca))
    tls.reload()
    assert not caplog.records
    write(tmp_path, ca, trustme.KeyType.RSA)
    tls.reload()
    after, _ = await handshake(tls, trusting(ca))
    assert after != before
    assert [r.message for r in caplog.records] == [f"certificate reloaded from {tmp_path}"]


async def test_versions_and_ciphers_that_are_not_allowed_are_refused() -> None:
    client = unverifying()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    await handshake(ServerTls(None, [], ciphers="ECDHE-ECDSA-AES128-GCM-SHA256"), client)
    for strict in (
        ServerTls(None, [], ciphers="ECDHE-ECDSA-AES256-GCM-SHA384"),
        ServerTls(None, [], minimum=ssl.TLSVersion.TLSv1_3),
    ):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await handshake(strict, client)


def garbage(directory: Path) -> None:
    (directory / "tls.key").write_text("no key")


def other_key(directory: Path) -> None:
    key = trustme.CA().issue_cert(HOST).private_key_pem.bytes()
    (directory / "tls.key").write_bytes(key)


def remove(directory: Path) -> None:
    (directory / "tls.crt").unlink()


@pytest.mark.parametrize("spoil", [garbage, other_key, remove])
async def test_unusable_files_are_warned_of_once_and_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    ca = trustme.CA()
    write(tmp_path, ca)
    tls = ServerTls(tmp_path, [])
    before = tls.context
    spoil(tmp_path)
    tls.reload()
    tls.reload()
    assert tls.context is before
    [record] = caplog.records
    assert str(tmp_path) in record.message
    with pytest.raises(BadServerCertificate, match=str(tmp_path)):
        ServerTls(tmp_path, [])
    write(tmp_path, ca)
    tls.reload()
    assert tls.context is not before
