"""The EPP with a real Kubernetes API server; the engines of the pods are HTTP servers."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from tandem_contract import headers as wire
from tandem_contract import labels
from tandem_contract.documents import parse_documents
from tandem_contract.endpoints import DEBUG_PODS
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, load_keys
from tandem_contract.plan_verification import verify
from tandem_contract.pod_reports import PodReport
from tandem_epp.backends.pod_backend import pod_backends
from tandem_epp.process.configuration import load
from tandem_kube.client import connect
from tandem_kube.resources import ROLE_BINDINGS, ROLES

from ...cluster.control_plane import ControlPlane
from ...kube.apis import proxied
from ..real import Backend, Epp, envoy, envoy_settings, epp, serving, starting_epp, until
from .cluster_pods import ENDPOINT, Pods

pytestmark = [pytest.mark.component, pytest.mark.control_plane]

LONG = "word " * 1600
CONFIG = "disaggregated_serving: {enabled: true}\n"


def config_file(folder: Path) -> Path:
    file = folder / "router.yaml"
    file.write_text(CONFIG)
    return file


def flags(namespace: str) -> tuple[str, ...]:
    return ("--discovery", "kubernetes", "--namespace", namespace, "--endpoint", "chat")


@dataclass
class Stack:
    """An EPP behind Envoy."""

    epp: Epp
    url: str
    keys: Path
    session: aiohttp.ClientSession

    async def post(self, prompt: str, model: str = "m") -> int:
        data = io.BytesIO(json.dumps({"model": model, "prompt": prompt}).encode())
        async with self.session.post(self.url + "/v1/completions", data=data) as response:
            await response.read()
            return response.status

    def plan(self, backend: Backend) -> Plan:
        """The plan of the last request that `backend` received."""
        headers = backend.received[-1].headers
        keys, request_id = load_keys(self.keys), headers[wire.REQUEST_ID]
        return verify(headers[wire.PLAN], keys, request_id=request_id, now=0.0)


@asynccontextmanager
async def stack(folder: Path, namespace: str, kubeconfig: Path) -> AsyncIterator[Stack]:
    keys = folder / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    async with AsyncExitStack() as parts:
        options = (*flags(namespace), "--plan-key-dir", str(keys))
        started = epp(config_file(folder), *options, KUBECONFIG=str(kubeconfig))
        picker = await parts.enter_async_context(started)
        settings = envoy_settings(picker.grpc)
        url = await parts.enter_async_context(envoy(folder, settings))
        session = await parts.enter_async_context(
            aiohttp.ClientSession(headers={"content-type": "application/json"})
        )
        yield Stack(picker, url, keys, session)


async def test_requests_through_envoy_follow_changes_of_pods(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    d1, d2, p1, p2 = Backend("d1"), Backend("d2"), Backend("p1"), Backend("p2")
    async with serving(d1, d2, p1, p2):
        await pods.create(d1, "decode")
        await pods.create(p1, "prefill")
        await pods.create(p2, "prefill", compat="c2")
        async with stack(tmp_path, pods.namespace, control_plane.kubeconfig) as router:
            assert await router.epp.serves("d1", "p1", "p2")
            assert await router.post(LONG) == 200
            plan = router.plan(d1)
            assert plan.path is RoutingPath.PREFILL_THEN_DECODE
            assert (plan.decode.name, [p.name for p in plan.prefill]) == ("d1", ["p1"])
            assert await router.post("hello", model="other") == 404

            slow = asyncio.create_task(router.post("slow"))
            await until(lambda: holds(len(d1.received) == 2))
            await pods.draining("d1")
            await pods.create(d2, "decode", compat="c2")
            await until(lambda: router.epp.serves("d2", "p1", "p2"))
            assert await router.post(LONG) == 200
            assert [p.name for p in router.plan(d2).prefill] == ["p2"], (
                "the prefill pod has the decode pod's hash"
            )
            assert len(d1.received) == 2, "a draining pod gets no new request"
            d1.release.set()
            assert await slow == 200, "a request under way continues"
            await until(lambda: holds_none_in_flight(router.epp))

            await pods.delete("d2")
            await pods.draining("d1", None)
            await until(lambda: router.epp.serves("d1", "p1", "p2"))
            await pods.ready("p1", False)
            await until(lambda: router.epp.serves("d1", "p2"))
            assert await router.post("new " + LONG) == 200
            assert router.plan(d1).path is RoutingPath.FALLBACK

            await pods.delete("d1", grace=0)
            await pods.create(d2_again := Backend("d1", port=d2.port), "decode")
            await until(lambda: router.epp.serves("d1", "p2"))
            assert await router.post("after") == 200
            assert (len(d1.received), d2_again.received) == (3, [])
            assert router.plan(d2).decode.name == "d1", "a new pod with the same name"


async def test_existing_pods_serve_without_the_operator(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    a, b = Backend("a"), Backend("b")
    async with serving(a, b):
        await pods.create_plain("vllm-a", {"app": "vllm"})
        annotations = {labels.TARGET_PORT: str(b.port)}
        await pods.create_plain("vllm-b", {"app": "vllm", labels.LLMD_ROLE: "both"}, annotations)
        await pods.create_plain("wrong", {"app": "vllm", labels.LLMD_ROLE: "x"})
        await pods.create_plain("other", {"app": "y"})
        options = (
            *("--discovery", "kubernetes", "--namespace", pods.namespace),
            *("--selector", "app=vllm", "--target-port", str(a.port)),
        )
        environment = {"KUBECONFIG": str(control_plane.kubeconfig)}
        async with epp(config_file(tmp_path), *options, **environment) as picker:
            assert await picker.serves("vllm-a", "vllm-b")
            figures = await picker.figures()
            assert figures['tandem_epp_discovery_pods{state="serving"}'] == 2
            assert figures['tandem_epp_discovery_pods{state="unusable"}'] == 1


async def test_the_node_and_the_fabric_domain_of_pods_are_known(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    await pods.create_plain("a", {**ENDPOINT, labels.FABRIC_DOMAIN: "r1"}, node="n1")
    await pods.create_plain("b", ENDPOINT, node="n1")
    await pods.create_plain("c", {**ENDPOINT, "rack": "r2"}, node="n2")
    await pods.create_plain("d", ENDPOINT, node="n3", nodeSelector={"rack": "r2"})
    config, kubeconfig = config_file(tmp_path), str(control_plane.kubeconfig)
    async with epp(config, *flags(pods.namespace), KUBECONFIG=kubeconfig) as picker:
        known = {"a": ("n1", "r1"), "b": ("n1", "r1"), "c": ("n2", ""), "d": ("n3", "")}
        assert await places(picker) == known
        config.write_text("disaggregated_serving: {enabled: true, domain_label: rack}\n")
        known |= {"c": ("n2", "r2"), "d": ("n3", "r2")}
        await until(lambda: has_places(picker, known))


async def places(picker: Epp) -> dict[str, tuple[str, str]]:
    """Pod → its node and domain, as the EPP reports them."""
    url = f"http://127.0.0.1:{picker.metrics}{DEBUG_PODS}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        reports = msgspec.json.decode(await response.read(), type=list[PodReport])
    return {report.name: (report.node, report.domain) for report in reports}


async def has_places(picker: Epp, expected: dict[str, tuple[str, str]]) -> bool:
    return await places(picker) == expected


async def test_the_last_known_pods_serve_while_the_api_is_unreachable(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    d1, d2 = Backend("d1"), Backend("d2")
    async with serving(d1, d2), proxied(control_plane.kubeconfig, tmp_path) as (proxy, kubeconfig):
        await pods.create(d1, "decode")
        await proxy.refuse()
        started = starting_epp(
            config_file(tmp_path), *flags(pods.namespace), KUBECONFIG=str(kubeconfig)
        )
        async with started as picker:
            await until(lambda: failing(picker))
            assert not await picker.ready(), "it has never listed the pods"
            await proxy.accept()
            await until(picker.ready)
            assert await picker.serves("d1")

            await proxy.refuse()
            await until(lambda: connected(picker, 0))
            await pods.create(d2, "decode")
            assert await picker.serves("d1")
            assert await picker.ready()
            await proxy.accept()
            await until(lambda: picker.serves("d1", "d2"))
            await until(lambda: connected(picker, 1))


async def test_the_right_to_get_list_and_watch_pods_is_enough(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    user = f"epp-of-{pods.namespace}"
    kubeconfig = control_plane.kubeconfig_for(user)
    started = starting_epp(
        config_file(tmp_path), *flags(pods.namespace), KUBECONFIG=str(kubeconfig)
    )
    async with started as picker, await connect(control_plane.kubeconfig) as api:
        await until(lambda: failing(picker))
        assert not await picker.ready()
        for body in rights(pods.namespace, user):
            await api.create(ROLES if body["kind"] == "Role" else ROLE_BINDINGS, body)
        await until(picker.ready)
        await until(lambda: connected(picker, 1))


def rights(namespace: str, user: str) -> list[dict[str, Any]]:
    api, metadata = "rbac.authorization.k8s.io", {"name": "epp", "namespace": namespace}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    kind = {"apiVersion": f"{api}/v1", "metadata": metadata}
    return [
        {**kind, "kind": "Role", "rules": [rule]},
        {
            **kind,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "epp"},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    ]


async def holds(value: bool) -> bool:
    return value


async def holds_none_in_flight(picker: Epp) -> bool:
    return await picker.in_flight() == 0


async def connected(picker: Epp, value: float) -> bool:
    return (await picker.figures())["tandem_epp_discovery_connected"] == value


async def failing(picker: Epp) -> bool:
    try:
        return (await picker.figures())["tandem_epp_discovery_failures_total"] >= 2
    except aiohttp.ClientError:
        return False


def test_the_documented_example_is_accepted_by_the_api_server(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    example = (Path(__file__).parents[3] / "examples" / "epp" / "vllm.yaml").read_text()
    flags = ("--validate=strict", f"--namespace={namespace}", "--dry-run=server", "-f", "-")
    applied = control_plane.kubectl("apply", *flags, input=example)
    assert len(applied.splitlines()) == 7
    documents = {
        (d.data["kind"], d.data["metadata"]["name"]): d for d in parse_documents(example, "")
    }
    file = tmp_path / "router.yaml"
    file.write_text(documents["ConfigMap", "vllm-epp"].data["data"]["router.yaml"])
    load(file, {}, lists_backends=False)
    template = documents["Deployment", "vllm"].data["spec"]["template"]
    discovered = pod_backends(
        {
            "metadata": {"name": "x", "uid": "u", **template["metadata"]},
            "status": {"podIP": "10.0.0.1"},
        },
        (8000,),
    )
    assert isinstance(discovered, tuple)
    assert [each.backend.url for each in discovered] == ["http://10.0.0.1:8080"]
    assert discovered[0].backend.models == ("Qwen/Qwen3-0.6B", "qwen")
