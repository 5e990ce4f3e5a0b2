"""The objects of an endpoint on a real API server: accepted, and read back as written."""

import asyncio
import json
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import endpoints, labels
from tandem_kube.client import Api, connect
from tandem_kube.errors import Conflict
from tandem_kube.resources import SERVICES, Resource, resource_of
from tandem_local.ports import free_port
from tandem_operator.observed import Body, EndpointKey
from tandem_operator.planning.drift import is_up_to_date
from tandem_operator.routing.endpoint.observed import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    EndpointPool,
    ObjectRef,
    ObservedEndpoint,
)
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.runtime.write_errors import failure_from_error

from ..cluster.control_plane import ControlPlane
from ..cluster.fixtures import fetched_module
from ..epp.real import process, until
from .endpoints import NOW, SECRET, decode
from .pool_yaml import decode_pool
from .test_policies import POLICY

pytestmark = pytest.mark.control_plane

SETTINGS = RouterSettings(
    image_pull_policy="IfNotPresent",
    image_pull_secrets=("registry",),
    envoy_resources={"requests": {"cpu": "1000m"}, "limits": {"memory": "1024Mi"}},
    node_selector={"disk": "fast"},
    tolerations=({"key": "router", "operator": "Exists"},),
    priority_class="system-cluster-critical",
    network_policy=POLICY,
    epp_env={"env": ({"name": "A", "value": "b"},), "envFrom": ({"secretRef": {"name": "s"}},)},
)
DECODE_POOLS = Resource(labels.API_VERSION, "decodepools")
GATEWAY_CRDS = (
    ("sigs.k8s.io/gateway-api@v1.3.0", "standard/gateway.networking.k8s.io_httproutes.yaml"),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.0.0",
        "bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.0.0",
        "bases/inference.networking.x-k8s.io_inferencepools.yaml",
    ),
)


@pytest.fixture
async def api(crds: ControlPlane) -> AsyncIterator[Api]:
    async with await connect(crds.kubeconfig) as connected:
        yield connected


async def observed_in(api: Api, namespace: str, **spec: Any) -> ObservedEndpoint:
    """Endpoint chat of a DecodePool that exists, because garbage collection checks the owner."""
    body = decode_pool(routing={"endpoint": "chat"})
    body["metadata"]["namespace"] = namespace
    created = await api.create(DECODE_POOLS, body)
    pool = EndpointPool(created["metadata"]["uid"], decode(**spec))
    return ObservedEndpoint(EndpointKey(namespace, "chat"), NOW, (pool,), secret=SECRET)


async def applied(api: Api, bodies: Iterable[Body]) -> dict[ObjectRef, Body]:
    """Apply `bodies` and return the stored objects; unknown fields are an error."""
    answers = [
        await api.apply(resource_of(body), dict(body), manager="tandem-operator") for body in bodies
    ]
    return {ObjectRef.of(answer): answer for answer in answers}


async def test_applied_objects_are_up_to_date_and_need_no_second_write(
    api: Api, namespace: str
) -> None:
    observed = await observed_in(api, namespace)
    plan = plan_endpoint(observed, SETTINGS)
    live = await applied(api, plan.apply)
    assert [
        ObjectRef.of(body)
        for body in plan.apply
        if not is_up_to_date(live[ObjectRef.of(body)], body)
    ] == []
    again = plan_endpoint(replace(observed, children=live, secret=b""), SETTINGS)
    assert (again.apply, again.delete) == ((), ())


async def test_a_changed_object_is_written_once(api: Api, namespace: str) -> None:
    observed = await observed_in(api, namespace)
    live = await applied(api, plan_endpoint(observed, SETTINGS).apply)
    later = replace(observed, children=live, now=NOW + 3 * 86400)
    changed = replace(SETTINGS, envoy_replicas=3, node_selector={}, priority_class=None)
    plan = plan_endpoint(later, changed)
    kinds = {(body["kind"], body["metadata"]["name"]) for body in plan.apply}
    assert ("Deployment", "chat-envoy") in kinds
    assert ("Secret", "chat-plan-keys") in kinds
    assert ("Service", "chat") not in kinds
    live |= await applied(api, plan.apply)
    assert plan_endpoint(replace(later, children=live, secret=b""), changed).apply == ()


async def test_pods_pass_the_restricted_profile_and_all_but_addresses_and_keys_go_with_the_pool(
    crds: ControlPlane, api: Api, namespace: str
) -> None:
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    crds.kubectl("label", "namespace", namespace, enforce)
    observed = await observed_in(api, namespace)
    await applied(api, plan_endpoint(observed, RouterSettings(network_policy=POLICY)).apply)
    in_namespace = f"--namespace={namespace}"
    for component in ("envoy", "epp"):
        selector = f"--selector={labels.ENDPOINT}=chat,{labels.COMPONENT}={component}"
        crds.kubectl("wait", "pods", in_namespace, selector, "--for=create", "--timeout=60s")
    crds.kubectl("delete", "decodepools", "d", in_namespace)
    ours = f"--selector={labels.ENDPOINT}=chat"
    kinds = "deployments,configmaps,rolebindings,poddisruptionbudgets,networkpolicies"
    crds.kubectl("wait", kinds, in_namespace, ours, "--for=delete", "--timeout=60s")
    headless = ("services/chat-decode", "services/chat-epp-pods", "services/chat-epp-peers")
    crds.kubectl("wait", *headless, in_namespace, "--for=delete", "--timeout=60s")
    left = crds.kubectl("get", "services,secrets", in_namespace, ours, "--output=name").split()
    assert left == ["service/chat", "service/chat-epp", "secret/chat-plan-keys"]


async def test_a_foreign_service_is_not_taken_over(
    crds: ControlPlane, api: Api, namespace: str
) -> None:
    in_namespace = f"--namespace={namespace}"
    crds.kubectl("create", "service", "clusterip", "chat", "--tcp=80", in_namespace)
    bodies = plan_endpoint(await observed_in(api, namespace), SETTINGS).apply
    (service,) = (
        body for body in bodies if ObjectRef.of(body) == ObjectRef("v1", "Service", "chat")
    )
    with pytest.raises(Conflict) as refused:
        await api.apply(SERVICES, dict(service), manager="tandem-operator", force=False)
    assert failure_from_error(refused.value).reason == "NameTaken"
    selector = crds.kubectl("get", "service", "chat", in_namespace, "-ojsonpath={.spec.selector}")
    assert json.loads(selector) == {"app": "chat"}


async def test_the_epp_starts_with_its_rendered_flags_and_may_list_its_pods(
    crds: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    live = await applied(api, plan_endpoint(await observed_in(api, namespace), SETTINGS).apply)
    health = free_port("127.0.0.1")
    flags = rendered_flags(live, "chat-epp", tmp_path)
    for flag in ("--listen", "--metrics"):
        flags += [flag, f"127.0.0.1:{free_port('127.0.0.1')}"]
    account = crds.kubeconfig_for_service_account(namespace, "chat-epp")
    command = (sys.executable, "-m", "tandem_epp", *flags, "--health", f"127.0.0.1:{health}")
    async with process(*command, KUBECONFIG=str(account)) as picker:
        await until_ready(picker, health)


def rendered_flags(live: dict[ObjectRef, Body], deployment: str, folder: Path) -> list[str]:
    """The arguments of a Deployment's container, and in `folder` what it mounts: its configuration
    and the plan keys."""
    body: Any = live[ObjectRef("apps/v1", "Deployment", deployment)]
    (container,) = body["spec"]["template"]["spec"]["containers"]
    config: Any = live[ObjectRef("v1", "ConfigMap", deployment)]["data"]
    keys: Any = live[ObjectRef("v1", "Secret", "chat-plan-keys")]["data"]
    for mount, files in zip(container["volumeMounts"], (config, keys), strict=True):
        for name, content in files.items():
            file = folder / mount["mountPath"].lstrip("/") / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if files is config else b64decode(content))
    flags = [arg.replace("/etc", f"{folder}/etc", 1) for arg in container["args"]]
    return [arg.replace("/var", f"{folder}/var", 1) for arg in flags]


async def until_ready(program: asyncio.subprocess.Process, port: int) -> None:
    """Wait until the program says at `port` that it is ready."""

    async def ready() -> bool:
        assert program.returncode is None, "it ended at its start"
        url = f"http://127.0.0.1:{port}{endpoints.READY}"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    await until(ready)


@pytest.fixture(scope="module")
def gateway_crds(crds: ControlPlane, go_program: Path) -> ControlPlane:
    """With the definitions of Gateway API and its Inference Extension, from Go's module proxy."""
    for module, file in GATEWAY_CRDS:
        path = fetched_module(go_program, module) / "config/crd" / file
        crds.kubectl("apply", "--server-side", f"--filename={path}")
        crds.wait_until_established(f"--filename={path}")
    return crds


@pytest.mark.parametrize("pool_kind", [INFERENCE_POOL, INFERENCE_POOL_ALPHA])
@pytest.mark.usefixtures("gateway_crds")
async def test_inference_pool_and_route_match_their_crds(
    api: Api, namespace: str, pool_kind: tuple[str, str]
) -> None:
    routing = {
        "endpoint": "chat",
        "inferencePool": {"enabled": True},
        "gatewayRef": {
            "name": "inference",
            "namespace": "gateways",
            "sectionName": "http",
            "hostnames": ["chat.example.com", "*.chat.example.com"],
            "matches": [
                {"path": {"type": "PathPrefix", "value": "/v1"}},
                {"headers": [{"name": "X-Tenant", "value": "blue"}]},
            ],
        },
    }
    observed = await observed_in(api, namespace, routing=routing)
    observed = replace(observed, kinds=frozenset({pool_kind, HTTP_ROUTE}))
    bodies = [
        body
        for body in plan_endpoint(observed, SETTINGS).apply
        if (body["apiVersion"], body["kind"]) in observed.kinds
    ]
    assert [body["kind"] for body in bodies] == ["InferencePool", "HTTPRoute"]
    live = await applied(api, bodies)
    assert all(is_up_to_date(live[ObjectRef.of(body)], body) for body in bodies)
