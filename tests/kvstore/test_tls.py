"""Stores behind TLS with a private authority: named without `ca_file`, used with it."""

import asyncio
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import trustme
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tandem_kvstore.location import store_location
from tandem_kvstore.probe import probe_store
from tandem_kvstore.server.app import StoreServer, StoreSettings
from tandem_local.ports import free_port

from ..cluster import tools
from ..epp.real import process
from .servers import ACCESS_KEY, BUCKET, NAMESPACE, SECRET_KEY, s3_location

pytestmark = pytest.mark.component


async def test_plain_http_with_a_private_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    app = StoreServer(StoreSettings(tmp_path / "objects")).app()
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    try:
        location = store_location(f"https://127.0.0.1:{server.port}", NAMESPACE)
        untrusted = await probe_store(location)
        assert untrusted.detail.startswith("the certificate of 127.0.0.1 is not trusted")
        assert "ca_file" in untrusted.fix
        assert (await probe_store(replace(location, ca_file=tmp_path / "ca.pem"))).works
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("name", "days", "reason", "fix"),
    [
        ("127.0.0.1", -1, "certificate has expired", "renew the store's certificate"),
        ("127.0.0.2", 1, "IP address mismatch", "a host name that is in the certificate"),
    ],
)
async def test_a_certificate_of_a_known_authority_that_is_not_valid_here(
    tmp_path: Path, name: str, days: int, reason: str, fix: str
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    end = datetime.now(UTC) + timedelta(days=days)
    begin = end - timedelta(days=30)
    authority.issue_cert(name, not_before=begin, not_after=end).configure_cert(context)
    server = TestServer(StoreServer(StoreSettings(tmp_path / "objects")).app(), scheme="https")
    await server.start_server(ssl=context)
    try:
        endpoint = f"https://127.0.0.1:{server.port}"
        location = store_location(endpoint, NAMESPACE)
        result = await probe_store(replace(location, ca_file=tmp_path / "ca.pem"))
    finally:
        await server.close()
    assert not result.works
    assert reason in result.detail
    assert fix in result.fix


async def test_s3_with_a_private_authority(tmp_path: Path, versitygw_program: None) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    (tmp_path / "objects" / BUCKET).mkdir(parents=True)
    port = free_port("127.0.0.1")
    keys = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    command = (
        *(tools.path("versitygw"), "--port", f"127.0.0.1:{port}", "--quiet"),
        *("--cert", tmp_path / "cert.pem", "--key", tmp_path / "key.pem"),
        *("posix", tmp_path / "objects"),
    )
    async with process(*command, **keys) as server:
        location = s3_location(f"https://127.0.0.1:{port}")
        trusted = replace(location, ca_file=tmp_path / "ca.pem")
        async with asyncio.timeout(20):
            while not (result := await probe_store(trusted)).works:
                assert server.returncode is None, result
                await asyncio.sleep(0.05)
        untrusted = await probe_store(location)
    assert untrusted.detail.startswith("the certificate of 127.0.0.1 is not trusted")


async def test_s3_with_a_certificate_that_is_its_own_authority(tmp_path: Path) -> None:
    """As `openssl req -x509` makes it. OpenSSL accepts it, obstore does not."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    authority, chain = tmp_path / "ca.pem", tmp_path / "chain.pem"
    authority.write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain.write_bytes(private + authority.read_bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain)
    server = TestServer(StoreServer(StoreSettings(tmp_path / "objects")).app(), scheme="https")
    await server.start_server(ssl=context)
    try:
        location = s3_location(f"https://127.0.0.1:{server.port}")
        result = await probe_store(replace(location, ca_file=authority))
        assert not result.works
        assert "self-signed" in result.detail
        assert "CA:FALSE" in result.fix
    finally:
        await server.close()
