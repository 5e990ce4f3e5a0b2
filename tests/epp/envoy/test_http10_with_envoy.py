"""HTTP/1.0 through real Envoy, EPP and sidecar, as a client writes it."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.plan_keys import PlanKeys
from tandem_operator.routing.envoy.http_filters import BodyMode
from tandem_sidecar.process.run import start
from tandem_sidecar.settings import Settings

from ...sidecar.peers import FakeDecode
from ..real import envoy, envoy_settings, epp
from .test_with_envoy import MODES

pytestmark = pytest.mark.component

LOOPBACK = HostPort("127.0.0.1", 0)


async def ask(address: HostPort, *headers: str, body: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, which ends with the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    lines = (*headers, "content-type: application/json", f"content-length: {len(body)}")
    head = "".join(f"{line}\r\n" for line in ("POST /v1/completions HTTP/1.0", *lines, ""))
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    head_bytes, _, rest = answer.partition(b"\r\n\r\n")
    return head_bytes.lower(), rest


@MODES
async def test_a_client_of_http_1_0_is_served(tmp_path: Path, mode: BodyMode) -> None:
    async with AsyncExitStack() as parts:
        engine = await parts.enter_async_context(FakeDecode())
        settings = Settings(listen=LOOPBACK, admin=LOOPBACK, engine=engine.address)
        sidecar = await parts.enter_async_context(start(settings, PlanKeys(None)))
        config = tmp_path / "router.yaml"
        backend = {"name": "d-0", "url": f"http://{sidecar.listen}"}
        config.write_text(json.dumps({"backends": [backend]}))
        picker = await parts.enter_async_context(epp(config))
        edge = envoy_settings(picker.grpc, body_mode=mode)
        url = await parts.enter_async_context(envoy(tmp_path, edge))
        address = parse_host_port(url.removeprefix("http://"))
        for headers in ((), ("host: example",)):
            whole = b'{"model": "m", "prompt": "p"}'
            head, body = await ask(address, *headers, body=whole)
            assert head.split(b" ")[1] == b"200"
            assert json.loads(body) == {"choices": [{"text": "hello"}]}
            stream = b'{"model": "m", "prompt": "p", "stream": true}'
            head, body = await ask(address, *headers, body=stream)
            assert head.split(b" ")[1] == b"200"
            # Chunks do not exist in HTTP/1.0: the end of the connection ends the stream.
            assert b"transfer-encoding" not in head
            assert body == b'data: {"text": "one"}\n\ndata: {"text": "two"}\n\ndata: [DONE]\n\n'
