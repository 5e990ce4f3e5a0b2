"""Mutual TLS from Envoy to the EPP and the sidecar, and from the EPP to the sidecar."""

import asyncio
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
import trustme

from tandem_contract.server_tls import mutual_client
from tandem_operator.routing.envoy.clusters import MutualTls

from ...sidecar.processes import sidecar
from ..real import Epp, envoy, envoy_settings, epp, serving_app, until
from .test_hits_with_envoy import FakeVllm

pytestmark = pytest.mark.component

NAME = "chat.ns.svc"
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False}


class MountedSecret:
    """A directory with a Secret, updated as the kubelet does: by a symbolic link that moves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._versions = 0
        directory.mkdir()
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (directory / name).symlink_to(Path("..data") / name)

    def write(self, ca: trustme.CA, *names: str) -> None:
        self._versions += 1
        version = self.directory / f"..v{self._versions}"
        version.mkdir()
        issued = ca.issue_cert(*names)
        (version / "ca.crt").write_bytes(ca.cert_pem.bytes())
        (version / "tls.crt").write_bytes(b"".join(c.bytes() for c in issued.cert_chain_pems))
        (version / "tls.key").write_bytes(issued.private_key_pem.bytes())
        link = self.directory / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self.directory / "..data")


@dataclass
class Stack:
    url: str
    http: aiohttp.ClientSession
    picker: Epp
    engine: FakeVllm
    sidecar: tuple[str, int]
    secret: MountedSecret
    ca: trustme.CA

    async def post(self) -> int:
        async with self.http.post(f"{self.url}/v1/completions", json=BODY) as response:
            await response.read()
            return response.status

    async def is_decided(self) -> bool:
        """Whether a request got through, and the EPP has decided one: Envoy finds it by then."""
        assert await self.post() == 200
        figures = await self.picker.figures()
        return any(v for k, v in figures.items() if k.startswith("tandem_epp_decisions_total"))


@asynccontextmanager
async def running(folder: Path, *, envoys_name: str = NAME) -> AsyncIterator[Stack]:
    secret, ca = MountedSecret(folder / "tls"), trustme.CA()
    secret.write(ca, NAME)
    engine = FakeVllm()
    flags = ("--mutual-tls", str(secret.directory))
    async with AsyncExitStack() as parts:
        engine_url = await parts.enter_async_context(serving_app(engine.app()))
        pod = await parts.enter_async_context(sidecar("--engine", engine_url, *flags))
        address = pod.url("").removeprefix("http://")
        config = folder / "router.yaml"
        backend = {"name": "d", "url": f"https://{address}", "role": "unified", "models": ["m"]}
        config.write_text(json.dumps({"backends": [backend]}))
        picker = await parts.enter_async_context(epp(config, *flags))
        await until(lambda: picker.serves("d"))
        tls = MutualTls(str(secret.directory), str(folder), envoys_name)
        for name, content in tls.secret_files().items():
            (folder / name).write_text(json.dumps(content))
        settings = replace(envoy_settings(picker.grpc, (address,)), tls=tls)
        url = await parts.enter_async_context(envoy(folder, settings))
        http = await parts.enter_async_context(aiohttp.ClientSession())
        host, _, port = address.rpartition(":")
        yield Stack(url, http, picker, engine, (host, int(port)), secret, ca)


async def serial(address: tuple[str, int], client: ssl.SSLContext) -> bytes:
    """The certificate that a new connection gets, once the server has accepted the client's."""
    reader, writer = await asyncio.open_connection(*address, ssl=client)
    try:
        # TLS 1.3 refuses a client only after the client's side of the handshake.
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        if not await reader.read(1):
            raise ConnectionError("closed")
        certificate = writer.get_extra_info("ssl_object").getpeercert(True)
        assert isinstance(certificate, bytes)
        return certificate
    finally:
        writer.close()


async def test_requests_reach_the_engine_and_strangers_reach_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        await until(stack.is_decided)
        stranger = ssl.create_default_context()
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        other = trustme.CA()
        with_other = ssl.create_default_context()
        with_other.check_hostname, with_other.verify_mode = False, ssl.CERT_NONE
        other.issue_cert(NAME).configure_cert(with_other)
        for address in (stack.sidecar, ("127.0.0.1", stack.picker.grpc)):
            for client in (stranger, with_other):
                with pytest.raises((ConnectionError, ssl.SSLError)):
                    await serial(address, client)
            with socket.create_connection(address) as plain:
                plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"HTTP/1.1 200" not in plain.recv(100)


async def test_envoy_calls_only_pods_whose_certificate_has_the_endpoints_name(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, envoys_name="other.ns.svc") as stack:
        assert await stack.post() == 503


async def test_a_renewed_certificate_loses_no_request(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        own = mutual_client(stack.secret.directory)
        await until(stack.is_decided)
        before = await serial(stack.sidecar, own)
        statuses: set[int] = set()
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                statuses.add(await stack.post())

        loading = asyncio.create_task(load())
        stack.secret.write(stack.ca, NAME)

        async def is_renewed() -> bool:
            return await serial(stack.sidecar, own) != before

        await until(is_renewed)
        renewed = mutual_client(stack.secret.directory)
        # Both certificates are of one authority: a client with the first one is served still.
        assert await serial(stack.sidecar, renewed) == await serial(stack.sidecar, own)
        stop.set()
        await loading
        assert statuses == {200}
        assert await stack.post() == 200
