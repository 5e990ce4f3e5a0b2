"""Requests through a real Istio: HTTPRoute, InferencePool, our EPP over TLS, sidecars, engines."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tandem_contract import headers as wire
from tandem_contract import metrics
from tandem_contract.paths import RoutingPath
from tandem_local.ports import free_port
from tests.cluster.control_plane import ControlPlane
from tests.cluster.fixtures import LEFT_OUT
from tests.epp.real import Epp, until
from tests.sidecar.real.engine import SERVED
from tests.sidecar.real.pair import LONG as MANY

from .istio import GATEWAY_LABEL, GatewayEnvoy, gateway_envoy, istiod
from .site import Site, local_network, manifest, site

pytestmark = [
    pytest.mark.control_plane,
    pytest.mark.component,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("istiod_program", "ip_program"),
    pytest.mark.skipif(os.geteuid() != 0, reason=f"{LEFT_OUT}NO ROOT, FOR ADDRESSES OF PODS"),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = "word " * 100


@dataclass
class Running:
    """The whole path of a request."""

    site: Site
    epp: Epp
    envoy: GatewayEnvoy
    url: str
    http: aiohttp.ClientSession

    async def ask(self, prompt: object, **members: Any) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body of a completion's answer."""
        body = {"model": SERVED, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **members}
        async with self.http.post(self.url + "/v1/completions", json=body) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, headers, await answer.text()

    async def serves(self) -> bool:
        """Whether a request is answered by a pod that the EPP chose."""
        try:
            status, headers, _ = await self.ask("ready?")
        except aiohttp.ClientError:
            return False
        return status == 200 and wire.ROUTING_PATH in headers


@asynccontextmanager
async def running(cluster: ControlPlane, namespace: str, folder: Path) -> AsyncIterator[Running]:
    """Everything from the gateway to the engines, once a request is served."""
    port = free_port("127.0.0.1")
    async with AsyncExitStack() as parts:
        network = parts.enter_context(local_network())
        model = await parts.enter_async_context(site(cluster, namespace, network, folder))
        model.apply(*objects(port))
        epp = await parts.enter_async_context(model.picker(folder))
        control = await parts.enter_async_context(istiod(cluster.kubeconfig, folder))
        envoy = gateway_envoy(control, namespace, "inference-gateway", folder)
        gateway = await parts.enter_async_context(envoy)
        http = await parts.enter_async_context(aiohttp.ClientSession())
        stack = Running(model, epp, gateway, f"http://127.0.0.1:{port}", http)
        await until(stack.serves, within=120)
        yield stack


def objects(port: int) -> list[Any]:
    """The manifests for Istio, the gateway listening on `port`, and what Istio itself would add."""
    gateway, *others = manifest("istio")
    gateway["spec"]["listeners"][0]["port"] = port
    pool_and_picker = [e for e in manifest("epp") if e["kind"] in ("InferencePool", "Service")]
    return [
        gateway,
        *others,
        *pool_and_picker,
        # Istio makes this one together with the gateway's pods.
        service(
            "inference-gateway-istio",
            {GATEWAY_LABEL: "inference-gateway"},
            port,
            "http",
        ),
    ]


def service(name: str, selector: dict[str, str], port: int, protocol: str) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [{"port": port, "appProtocol": protocol}]},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    gateway_definitions: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    namespace = "istio-gateway"
    for name in ("istio-system", namespace):
        gateway_definitions.kubectl("create", "namespace", name)
    folder = tmp_path_factory.mktemp("istio")
    async with running(gateway_definitions, namespace, folder) as started:
        yield started
    gateway_definitions.kubectl("delete", "namespace", namespace, "--wait=false")


async def test_a_prompt_is_split_over_the_pods_of_the_pool(stack: Running) -> None:
    status, headers, body = await stack.ask(LONG)
    assert (status, headers[wire.ROUTING_PATH]) == (200, RoutingPath.PREFILL_THEN_DECODE)
    # Without plan keys the sidecar knows addresses only.
    assert headers[wire.PREFILL_BACKEND] == f"{stack.site.addresses['prefill-0']}:8000"
    assert headers[wire.DECODE_BACKEND] in stack.site.decode
    assert json.loads(body)["usage"]["completion_tokens"] == 4


async def test_tokens_arrive_while_others_are_generated(stack: Running) -> None:
    body = {"model": SERVED, "prompt": "stream " + LONG, "max_tokens": MANY, "stream": True}
    url = stack.url + "/v1/completions"
    async with stack.http.post(url, json=body | {"ignore_eos": True}) as answer:
        assert answer.status == 200
        await answer.content.readuntil(b"\n\n")
        # The decode engine still generates.
        engine, _ = stack.site.decode[answer.headers[wire.DECODE_BACKEND]]
        assert await engine.figure(metrics.ENGINE_RUNNING) == 1
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


async def test_the_epp_answers_itself_through_the_gateway(stack: Running) -> None:
    status, _, body = await stack.ask(["not", {"a": "prompt"}])
    assert status == 400, body
    assert json.loads(body)["error"]["code"] == 400


async def test_the_pool_is_accepted(stack: Running) -> None:
    pool = json.loads(
        stack.site.cluster.kubectl(
            *("get", "inferencepool", "llama", "--output=json"),
            f"--namespace={stack.site.namespace}",
        )
    )
    (parent,) = pool["status"]["parents"]
    assert parent["parentRef"]["name"] == "inference-gateway"
    conditions = {each["type"]: each["status"] for each in parent["conditions"]}
    assert conditions == {"Accepted": "True", "ResolvedRefs": "True"}


async def test_a_dead_epp_with_each_failure_mode(stack: Running) -> None:
    stack.epp.process.kill()
    await stack.epp.process.wait()
    stack.site.report("epp-0", ready=False)
    status, _, _ = await stack.ask("closed")
    assert status >= 500

    # Envoy passes a request without a pick only if it has no EPP to send the body to. So it is not
    # enough that the process has ended: the EPP's pod must have left the Service.
    patch = {"spec": {"endpointPickerRef": {"failureMode": "FailOpen"}}}
    stack.site.cluster.kubectl(
        *("patch", "inferencepool", "llama", f"--namespace={stack.site.namespace}"),
        *("--type=merge", f"--patch={json.dumps(patch)}"),
    )

    async def is_open() -> bool:
        return (await stack.ask("open"))[0] == 200

    await until(is_open)
