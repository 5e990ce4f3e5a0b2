"""routing.front on a real API server: the router's objects, its account, and a change of fronts."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.errors import ApiError
from tandem_kube.resources import DEPLOYMENTS, PODS
from tandem_local.ports import free_port
from tandem_operator.observed import Body
from tandem_operator.planning.drift import is_up_to_date
from tandem_operator.routing.endpoint.front import is_ending
from tandem_operator.routing.endpoint.observed import EndpointPlan, ObjectRef
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.runtime.cache import ClusterCache
from tandem_operator.runtime.cluster import Cluster

from ..cluster.control_plane import ControlPlane
from ..epp.real import process, until
from .endpoints import decode
from .pool_yaml import decode_pool
from .test_endpoint_on_server import (
    DECODE_POOLS,
    SETTINGS,
    api,
    applied,
    observed_in,
    rendered_flags,
    until_ready,
)

__all__ = ["api"]
pytestmark = pytest.mark.control_plane

ROUTER = {"front": "router"}
SERVICE = ObjectRef("v1", "Service", "chat")
ENVOY = ObjectRef("apps/v1", "Deployment", "chat-envoy")
EPP = ObjectRef("apps/v1", "Deployment", "chat-epp")


async def test_the_router_starts_with_its_rendered_flags_and_may_list_its_pods(
    crds: ControlPlane, api: Api, namespace: str, tmp_path: Path
) -> None:
    observed = await observed_in(api, namespace, routing=ROUTER)
    plan = plan_endpoint(observed, SETTINGS)
    live = await applied(api, plan.apply)
    outdated = [ObjectRef.of(b) for b in plan.apply if not is_up_to_date(live[ObjectRef.of(b)], b)]
    assert outdated == []
    flags = rendered_flags(live, "chat-router", tmp_path)
    admin = free_port("127.0.0.1")
    flags += ["--listen", "127.0.0.1:0", "--admin", f"127.0.0.1:{admin}"]
    flags += ["--peer-listen", f"127.0.0.1:{free_port('127.0.0.1')}"]
    account = crds.kubeconfig_for_service_account(namespace, "chat-epp")
    command = (sys.executable, "-m", "tandem_router.main", *flags)
    async with process(*command, KUBECONFIG=str(account)) as router:
        await until_ready(router, admin)


async def test_the_service_moves_to_the_router_and_the_rest_of_envoy_is_deleted(
    api: Api, namespace: str
) -> None:
    before = await observed_in(api, namespace)
    live = await applied(api, plan_endpoint(before, SETTINGS).apply)
    pool = replace(before.pools[0], pool=decode(routing=ROUTER))
    asked = replace(before, pools=(pool,), children=live, secret=b"")
    live |= await applied(api, plan_endpoint(asked, SETTINGS).apply)
    assert live[SERVICE]["spec"]["selector"][labels.COMPONENT] == "envoy"
    available = {ref: with_pods(body) for ref, body in live.items()}
    plan = plan_endpoint(replace(asked, children=available), SETTINGS)
    assert (plan.delete, plan.end) == ((), ())
    live |= await applied(api, plan.apply)
    selector = live[SERVICE]["spec"]["selector"]
    [router] = [
        body
        for body in live.values()
        if body["metadata"]["name"] == "chat-router" and body["kind"] == "Deployment"
    ]
    assert selector == router["spec"]["selector"]["matchLabels"]
    for ref in (ENVOY, EPP):
        plan = plan_endpoint(replace(asked, children=live), SETTINGS)
        assert (plan.apply, plan.delete, plan.end) == ((), (), (ref,))
        del live[ref]
    plan = plan_endpoint(replace(asked, children=live), SETTINGS)
    assert ObjectRef("v1", "Service", "chat-decode") in plan.delete
    left = {ref: body for ref, body in live.items() if ref not in plan.delete}
    again = plan_endpoint(replace(asked, children=left), SETTINGS)
    assert (again.apply, again.delete, again.end) == ((), (), ())


async def test_a_deployment_that_ends_stays_until_its_pods_have_ended(
    crds: ControlPlane, api: Api, namespace: str
) -> None:
    observed = await observed_in(api, namespace)
    cluster = Cluster(api, ClusterCache(nodes=False))
    for body in (await applied(api, plan_endpoint(observed, RouterSettings()).apply)).values():
        cluster.cache.upsert_child(body)
    envoys = f"{labels.ENDPOINT}=chat,{labels.COMPONENT}=envoy"

    async def pods() -> Sequence[Body]:
        return (await api.list(PODS, namespace, labels=envoys)).items

    async def finalized_by(*finalizers: str) -> None:
        """No kubelet drains the pods here: a finalizer keeps them."""
        for pod in await pods():
            patch = {"metadata": {"finalizers": list(finalizers)}}
            await api.patch(PODS, pod["metadata"]["name"], patch, namespace)

    async def are_created() -> bool:
        return len(await pods()) == RouterSettings().envoy_replicas

    async def are_being_deleted() -> bool:
        return all("deletionTimestamp" in pod["metadata"] for pod in await pods())

    await until(are_created)
    await finalized_by("tandem.dev/drains")
    assert await cluster.apply_endpoint(observed.key, EndpointPlan(end=(ENVOY,)))
    await until(are_being_deleted)
    assert await are_created(), "none of them has ended"
    assert is_ending(await api.get(DEPLOYMENTS, ENVOY.name, namespace))
    await finalized_by()
    in_namespace = f"--namespace={namespace}"
    name = f"deployments/{ENVOY.name}"
    crds.kubectl("wait", name, in_namespace, "--for=delete", "--timeout=60s")


def with_pods(body: Body) -> Body:
    """A Deployment, all of whose pods are available; no kubelet runs them here."""
    if body["kind"] != "Deployment":
        return body
    return {**body, "status": {"availableReplicas": body["spec"]["replicas"]}}


async def test_the_api_server_refuses_what_the_router_does_not_serve(
    api: Api, namespace: str
) -> None:
    routing: dict[str, Any] = {**ROUTER, "inferencePool": {"enabled": True}}
    body = decode_pool(routing=routing)
    body["metadata"]["namespace"] = namespace
    with pytest.raises(ApiError, match="or write front: envoy"):
        await api.create(DECODE_POOLS, body)
