"""The EPP behind Envoy configured as each gateway does it: docs/run/gateways.md names them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from tandem_contract import headers as wire
from tests.epp.envoy.test_with_envoy import (
    COMPLETIONS,
    LONG,
    SCORERS,
    Stack,
    at_rest,
    post,
    running,
)
from tests.epp.real import until
from tests.epp.server.http2.test_server import issue

from .envoy_configs import (
    ENVOY_AI_GATEWAY,
    ENVOY_AI_GATEWAY_BUFFERED,
    ISTIO,
    KGATEWAY,
    GatewayConfig,
)

pytestmark = pytest.mark.component

STREAMING = {"istio": ISTIO, "envoy-ai-gateway": ENVOY_AI_GATEWAY, "kgateway": KGATEWAY}
"""The gateways that do not buffer answers."""
ALL = STREAMING | {"envoy-ai-gateway-buffered": ENVOY_AI_GATEWAY_BUFFERED}
GATEWAYS = pytest.mark.parametrize("gateway", ALL.values(), ids=ALL)


@asynccontextmanager
async def behind(
    gateway: GatewayConfig, folder: Path, plugins: tuple[str, ...] = SCORERS
) -> AsyncIterator[Stack]:
    """The stack of `running`, with TLS to the EPP and the gateway's settings."""
    certificates = folder / "tls"
    certificates.mkdir()
    issue(trustme.CA(), certificates)
    flags = ("--tls-dir", str(certificates))
    async with running(folder, "BUFFERED", gateway, plugins, flags=flags) as stack:
        yield stack


@GATEWAYS
async def test_requests_are_split_and_refused(tmp_path: Path, gateway: GatewayConfig) -> None:
    async with behind(gateway, tmp_path) as stack:
        body = {"model": "m", "prompt": LONG}
        status, answer, _ = await post(stack, body)
        assert (status, answer) == (200, b"first last")
        (backend,) = [each for each in stack.decode if each.received]
        (request,) = backend.received
        assert request.body == json.dumps(body).encode()
        assert request.headers[wire.PREFILLER_HOST_PORT] == f"127.0.0.1:{stack.prefill.port}"
        assert request.headers[wire.DESTINATION_ENDPOINT] == f"127.0.0.1:{backend.port}"

        forged = {wire.DESTINATION_ENDPOINT: f"127.0.0.1:{stack.prefill.port}"}
        assert (await post(stack, body, **forged))[0] == 200
        assert not stack.prefill.received

        status, answer, _ = await post(stack, {"model": "other", "prompt": "x"})
        assert (status, json.loads(answer)["error"]["param"]) == (404, "model")
        status, _, _ = await post(stack, ["not an object"])
        assert status == 400
        await until(lambda: at_rest(stack))


@pytest.mark.parametrize("gateway", STREAMING.values(), ids=STREAMING)
async def test_an_answer_arrives_as_it_is_generated(tmp_path: Path, gateway: GatewayConfig) -> None:
    body = {"model": "m", "prompt": "x", "user": "slow"}
    async with (
        behind(gateway, tmp_path) as stack,
        stack.session.post(stack.url + COMPLETIONS, json=body) as response,
    ):
        assert await response.content.readexactly(6) == b"first "
        for backend in stack.decode:
            backend.release.set()
        assert await response.content.read() == b"last"


async def test_large_bodies_and_many_clients_in_full_duplex(tmp_path: Path) -> None:
    async with behind(ISTIO, tmp_path) as stack:
        for backend in stack.decode:
            backend.release.set()
        bodies = [{"model": "m", "prompt": f"{n} " + "x" * 300_000} for n in range(16)]
        answers = await asyncio.gather(*(post(stack, body) for body in bodies))
        assert {(status, answer) for status, answer, _ in answers} == {(200, b"first last")}
        assert stack.received == len(bodies)


async def test_istio_tells_which_endpoint_served(tmp_path: Path) -> None:
    plugins = ("header-based-testing-filter", "destination-endpoint-served-verifier")
    async with behind(ISTIO, tmp_path, plugins) as stack:
        for backend in stack.decode:
            address = f"127.0.0.1:{backend.port}"
            choice = {"test-epp-endpoint-selection": address}
            status, _, headers = await post(stack, {"model": "m", "prompt": "x"}, **choice)
            told = headers.get("x-conformance-test-served-endpoint")
            assert (status, headers.get("x-served-by"), told) == (200, backend.name, address)


@GATEWAYS
async def test_no_ready_pod_is_a_503_of_the_epp(tmp_path: Path, gateway: GatewayConfig) -> None:
    plugins = ("header-based-testing-filter",)
    async with behind(gateway, tmp_path, plugins) as stack:
        elsewhere = {"test-epp-endpoint-selection": "127.0.0.1:1"}
        status, answer, headers = await post(stack, {"model": "m", "prompt": "x"}, **elsewhere)
        assert (status, json.loads(answer)["error"]["code"]) == (503, 503)
        assert headers["retry-after"] == "1"
        assert stack.received == 0


@GATEWAYS
async def test_a_dead_epp(tmp_path: Path, gateway: GatewayConfig) -> None:
    async with behind(gateway, tmp_path) as stack:
        stack.epp.process.kill()
        await stack.epp.process.wait()
        # A request without a body: Envoy can pass it on, whatever it has sent to the EPP.
        async with stack.session.get(stack.url + "/v1/models") as response:
            served = response.status == 200
        assert served == gateway.failure_mode_allow
        assert stack.received == int(served)
