"""TLS to engines, certificates and plan keys that change while requests run."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from tandem_contract.commandline import HostPort
from tandem_contract.plan_keys import PlanKeys
from tandem_contract.server_tls import ServerTls
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Failure
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool
from tandem_sidecar.security.credentials import BadCertificates, EngineTls, Tls

from ..peers import PARAMS, FakeDecode, FakePrefill, Peer, Turn
from ..processes import Sidecar, fails, sidecar

REQUEST = request_bytes(b"GET", b"/", [(b"host", b"engine")], b"")


def serving(ca: trustme.CA, *names: str, expired: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=2)
    cert = ca.issue_cert(*(names or ("127.0.0.1",)), not_after=past if expired else None)
    cert.configure_cert(context)
    return context


@asynccontextmanager
async def engine(context: ssl.SSLContext) -> AsyncIterator[Peer]:
    peer = Peer()
    peer.tls = context
    async with peer:
        yield peer


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def trusting(ca: trustme.CA, directory: Path, **changes: Any) -> Tls:
    path = directory / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return Tls(engine=True, ca=path, **changes)


async def ask(pool: Pool, address: HostPort) -> Answer | NoAnswer:
    result: asyncio.Future[Answer | NoAnswer] = asyncio.get_running_loop().create_future()
    pool.send(address, b"GET", REQUEST, Collector(result.set_result), connect_timeout=10)
    async with asyncio.timeout(10):
        return await result


async def test_an_engine_with_a_certificate_of_the_authority_is_used(
    ca: trustme.CA, tmp_path: Path
) -> None:
    async with engine(serving(ca)) as peer:
        pool = Pool(EngineTls(trusting(ca, tmp_path), peer.address).for_address)
        for _ in range(3):
            answer = await ask(pool, peer.address)
            assert isinstance(answer, Answer)
        assert peer.connections == 1
        pool.close()


async def test_tls_is_used_only_where_it_is_configured(ca: trustme.CA, tmp_path: Path) -> None:
    async with Peer() as plain, engine(serving(ca)) as prefill:
        tls = Tls(prefill=True, ca=trusting(ca, tmp_path).ca)
        pool = Pool(EngineTls(tls, plain.address).for_address)
        for peer in (plain, prefill):
            assert isinstance(await ask(pool, peer.address), Answer)
        pool.close()


@pytest.mark.parametrize(
    ("names", "expired", "trusted", "cause"),
    [
        ((), False, False, "certificate verify failed: unable to get local issuer certificate"),
        ((), True, True, "certificate verify failed: certificate has expired"),
        (("10.1.2.3",), False, True, "certificate verify failed: IP address mismatch"),
        (("engine.local",), False, True, "certificate verify failed: IP address mismatch"),
    ],
)
async def test_an_engine_that_cannot_be_verified_gets_no_request(
    ca: trustme.CA,
    tmp_path: Path,
    names: tuple[str, ...],
    expired: bool,
    trusted: bool,
    cause: str,
) -> None:
    async with engine(serving(ca, *names, expired=expired)) as peer:
        tls = trusting(ca if trusted else trustme.CA(), tmp_path)
        answer = await ask(Pool(EngineTls(tls, peer.address).for_address), peer.address)
    assert isinstance(answer, NoAnswer)
    assert answer.failure is Failure.UNREACHABLE
    assert answer.detail.startswith(f"{peer.address}: {cause}")
    assert peer.requests == []


async def test_certificates_are_not_verified_only_where_that_is_configured() -> None:
    context = ServerTls(None, []).context
    async with engine(context) as decode, engine(context) as prefill:
        tls = Tls(engine=True, prefill=True, unverified_engine=True)
        pool = Pool(EngineTls(tls, decode.address).for_address)
        assert isinstance(await ask(pool, decode.address), Answer)
        refused = await ask(pool, prefill.address)
        assert isinstance(refused, NoAnswer)
        assert "certificate verify failed" in refused.detail
        pool.close()
        tls = Tls(engine=True, prefill=True, unverified_prefill=True)
        pool = Pool(EngineTls(tls, decode.address).for_address)
        assert isinstance(await ask(pool, prefill.address), Answer)
        assert isinstance(await ask(pool, decode.address), NoAnswer)
        pool.close()


async def test_each_rank_s_engine_speaks_tls() -> None:
    async with engine(ServerTls(None, []).context) as second:
        first = second.address._replace(port=second.address.port - 1)
        tls = Tls(engine=True, unverified_engine=True)
        pool = Pool(EngineTls(tls, first, 2).for_address)
        assert isinstance(await ask(pool, second.address), Answer)
        pool.close()


async def test_an_engine_without_tls_is_named_in_the_error(ca: trustme.CA, tmp_path: Path) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = HostPort(*server.sockets[0].getsockname())
    answer = await ask(Pool(EngineTls(trusting(ca, tmp_path), address).for_address), address)
    server.close()
    assert isinstance(answer, NoAnswer)
    assert answer.detail == f"{address}: TLS: wrong version number"


async def test_the_client_certificate_is_sent_to_an_engine_that_requires_one(
    ca: trustme.CA, tmp_path: Path
) -> None:
    context = serving(ca)
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    ours = ca.issue_cert("sidecar")
    paths = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    ours.private_key_pem.write_to_path(paths["key"])
    ours.cert_chain_pems[0].write_to_path(paths["certificate"])
    async with engine(context) as peer:
        without_certificate = Pool(EngineTls(trusting(ca, tmp_path), peer.address).for_address)
        refused = await ask(without_certificate, peer.address)
        assert isinstance(refused, NoAnswer)
        assert peer.requests == []
        pool = Pool(EngineTls(trusting(ca, tmp_path, **paths), peer.address).for_address)
        assert isinstance(await ask(pool, peer.address), Answer)
        pool.close()


async def test_new_certificates_are_used_without_losing_a_request(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The authority is replaced while a request runs, which ends normally; the next needs it."""
    proceed = asyncio.Event()
    other = trustme.CA()

    async def slow(turn: Turn) -> None:
        await proceed.wait()
        turn.answer(200, b"{}")

    async with engine(serving(ca)) as old, engine(serving(other)) as new:
        tls = EngineTls(trusting(ca, tmp_path), old.address)
        pool = Pool(lambda _address: tls.for_address(old.address))
        assert isinstance(await ask(pool, old.address), Answer)
        old.script = slow
        running = asyncio.create_task(ask(pool, old.address))
        await old.received(2)

        (tmp_path / "ca.pem").write_bytes(b"half a certifi")
        for _ in range(2):
            tls.reload()
        assert caplog.text.count("previous ones stay in use") == 1
        assert isinstance(await ask(pool, new.address), NoAnswer)

        other.cert_pem.write_to_path(tmp_path / "ca.pem")
        tls.reload()
        assert isinstance(await ask(pool, new.address), Answer)
        proceed.set()
        assert isinstance(await running, Answer)
        refused = await ask(pool, old.address)
        assert isinstance(refused, NoAnswer)
        assert "certificate verify failed" in refused.detail
        pool.close()


async def test_an_answer_that_ends_without_tls_close_is_incomplete(
    ca: trustme.CA, tmp_path: Path
) -> None:
    """Without TLS's close_notify, an attacker may have cut the connection; a body without a length
    ends with its connection."""
    complete = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it?")
        await writer.drain()
        if not complete.is_set():
            raw = writer.get_extra_info("socket")
            raw.shutdown(2)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=serving(ca))
    address = HostPort(*server.sockets[0].getsockname())
    pool = Pool(EngineTls(trusting(ca, tmp_path), address).for_address)
    assert isinstance(await ask(pool, address), NoAnswer)
    complete.set()
    assert isinstance(await ask(pool, address), Answer)
    server.close()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("", "ca.pem: contains no certificate in PEM format"),
        ("key", "key.pem: the key does not belong to the certificate"),
        ("junk", "key.pem: not a certificate and key in PEM format"),
        (None, "ca.pem: cannot read it: No such file or directory"),
    ],
)
def test_unusable_files_are_named(
    ca: trustme.CA, tmp_path: Path, contents: str | None, message: str
) -> None:
    first, second = ca.issue_cert("a"), ca.issue_cert("b")
    paths = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    first.cert_chain_pems[0].write_to_path(paths["certificate"])
    second.private_key_pem.write_to_path(paths["key"])
    tls = trusting(ca, tmp_path, **paths)
    assert tls.ca is not None
    if contents is None:
        tls.ca.unlink()
    elif contents == "":
        tls.ca.write_bytes(b"")
    elif contents == "junk":
        paths["key"].write_bytes(b"junk")
    with pytest.raises(BadCertificates, match=message):
        EngineTls(tls, HostPort("127.0.0.1", 1))


@pytest.mark.component
async def test_a_hand_off_over_tls_on_both_legs(ca: trustme.CA, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(path)
    decode, prefill = FakeDecode(), FakePrefill()
    decode.tls = prefill.tls = serving(ca)
    async with decode, prefill, aiohttp.ClientSession() as http:
        engines = ("--engine", f"https://{decode.address}", "--prefill-tls", "--tls-ca", str(path))
        split = {"x-prefiller-host-port": str(prefill.address)}
        async with sidecar(*engines, "--prefill-allow", str(prefill.address)) as server:
            async with http.post(server.url(), json={"prompt": "Hi"}, headers=split) as answer:
                assert answer.status == 200
                assert answer.headers["x-continuum-routing-path"] == "prefill_then_decode"
            assert PARAMS in decode.requests[0].body

            trustme.CA().cert_pem.write_to_path(path)
            await server.wait_for_log("certificates reloaded")
            async with http.post(server.url(), json={"prompt": "Hi"}, headers=split) as answer:
                assert answer.status == 502
            assert len(prefill.requests) == len(decode.requests) == 1


@pytest.mark.component
@pytest.mark.parametrize("speaks", [("--engine", "https://127.0.0.1:1"), ("--prefill-tls",)])
async def test_unusable_certificates_are_a_usage_error(
    tmp_path: Path, speaks: tuple[str, ...]
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(b"half a certifi")
    status, err = await fails(*speaks, "--tls-ca", str(path))
    assert (status, "Traceback" in err) == (2, False)
    assert f"{path}: contains no certificate in PEM format" in err


# Plan keys.


def test_keys_are_reloaded_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef")
    keys = PlanKeys(tmp_path)
    assert set(keys.current) == {"a"}
    (tmp_path / "b").write_bytes(b"fedcba9876543210")
    keys.reload()
    assert set(keys.current) == {"a", "b"}
    (tmp_path / "a").unlink()
    keys.reload()
    assert set(keys.current) == {"b"}


def test_keys_stay_when_the_directory_becomes_unusable(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef")
    keys = PlanKeys(tmp_path)
    (tmp_path / "b").write_bytes(b"short")
    keys.reload()
    assert set(keys.current) == {"a"}


def test_keys_stay_when_the_directory_has_none_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef")
    keys = PlanKeys(tmp_path)
    (tmp_path / "a").unlink()
    keys.reload()
    assert set(keys.current) == {"a"}
    assert "the previous keys stay in use" in caplog.text
    (tmp_path / "b").write_bytes(b"fedcba9876543210")
    keys.reload()
    assert set(keys.current) == {"b"}


def test_an_unusable_directory_at_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        PlanKeys(tmp_path)


def test_no_directory_means_no_keys() -> None:
    keys = PlanKeys(None)
    keys.reload()
    assert keys.current == {}


@pytest.mark.component
async def test_workers_serve_clients_by_the_certificate_that_the_directory_has_now(
    tmp_path: Path,
) -> None:
    first, second = trustme.CA(), trustme.CA()

    def write(ca: trustme.CA) -> None:
        issued = ca.issue_cert("127.0.0.1")
        (tmp_path / "tls.crt").write_bytes(issued.cert_chain_pems[0].bytes())
        (tmp_path / "tls.key").write_bytes(issued.private_key_pem.bytes())

    async def status(server: Sidecar, ca: trustme.CA) -> int:
        trust = ssl.create_default_context()
        ca.configure_trust(trust)
        url = server.url("/v1/models").replace("http:", "https:")
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trust) as answer:
            return answer.status

    write(first)
    async with FakeDecode() as decode:
        decode.generate = Peer().default
        flags = ("--engine", f"http://{decode.address}", "--workers", "2")
        async with sidecar(*flags, "--cert-path", str(tmp_path)) as server:
            for _ in range(4):
                assert await status(server, first) == 200
            write(second)
            for _ in range(2):
                await server.wait_for_log("certificate reloaded")
            for _ in range(4):
                assert await status(server, second) == 200
