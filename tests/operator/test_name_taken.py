"""An endpoint's object names that are taken by other objects, on a real API server."""

from collections.abc import AsyncIterator

import pytest

from tandem_contract import labels
from tandem_kube.client import Api, connect
from tandem_kube.errors import NotFound
from tandem_kube.resources import CONFIG_MAPS, SECRETS, SERVICES, Object, Resource
from tandem_operator.observed import EndpointKey
from tandem_operator.routing.endpoint.observed import EndpointPlan, ObjectRef
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.runtime.cache import ClusterCache
from tandem_operator.runtime.cluster import Cluster

from ..cluster.control_plane import ControlPlane
from .endpoints import decode, endpoint

pytestmark = pytest.mark.control_plane


@pytest.fixture
async def api(control_plane: ControlPlane) -> AsyncIterator[Api]:
    async with await connect(control_plane.kubeconfig) as connected:
        yield connected


def body(namespace: str, kind: str, endpoint: str = "chat", **data: str) -> Object:
    marks = {labels.ENDPOINT: endpoint}
    metadata = {"name": "chat-x", "namespace": namespace, "labels": marks}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": data}


@pytest.mark.parametrize(("kind", "resource"), [("ConfigMap", CONFIG_MAPS), ("Secret", SECRETS)])
async def test_a_foreign_object_is_not_modified(
    api: Api, namespace: str, kind: str, resource: Resource
) -> None:
    foreign = body(namespace, kind, theirs="eA==")
    foreign["metadata"]["labels"] = {}
    await api.create(resource, foreign)
    key, cluster = EndpointKey(namespace, "chat"), Cluster(api, ClusterCache(nodes=False))
    plan = EndpointPlan(apply=(body(namespace, kind, ours="eA=="),))
    assert not await cluster.apply_endpoint(key, plan)
    failure = cluster.cache.child_failures[key][ObjectRef("v1", kind, "chat-x")]
    assert failure.reason == "NameTaken"
    assert "rename or delete it" in failure.message
    assert (await api.get(resource, "chat-x", namespace))["data"] == {"theirs": "eA=="}
    await api.delete(resource, "chat-x", namespace)
    assert await cluster.apply_endpoint(key, plan)
    assert not cluster.cache.child_failures[key]


async def test_our_object_without_its_label_gets_the_label_back(api: Api, namespace: str) -> None:
    key, expected = EndpointKey(namespace, "chat"), body(namespace, "ConfigMap", ours="x")
    assert await Cluster(api, ClusterCache(nodes=False)).apply_endpoint(
        key, EndpointPlan(apply=(expected,))
    )
    change = {"metadata": {"labels": {labels.ENDPOINT: None}}}
    await api.patch(CONFIG_MAPS, "chat-x", change, namespace)
    assert await Cluster(api, ClusterCache(nodes=False)).apply_endpoint(
        key, EndpointPlan(apply=(expected,))
    )
    live = await api.get(CONFIG_MAPS, "chat-x", namespace)
    assert live["metadata"]["labels"] == {labels.ENDPOINT: "chat"}


async def test_an_endpoint_does_not_take_another_endpoints_object(api: Api, namespace: str) -> None:
    first, second = EndpointKey(namespace, "chat"), EndpointKey(namespace, "chat-x")
    cluster = Cluster(api, ClusterCache(nodes=False))
    first_body, second_body = body(namespace, "ConfigMap"), body(namespace, "ConfigMap", "chat-x")
    assert await cluster.apply_endpoint(first, EndpointPlan(apply=(first_body,)))
    assert not await cluster.apply_endpoint(second, EndpointPlan(apply=(second_body,)))
    (failure,) = cluster.cache.child_failures[second].values()
    assert failure.reason == "NameTaken"
    live = await api.get(CONFIG_MAPS, "chat-x", namespace)
    assert live["metadata"]["labels"] == {labels.ENDPOINT: "chat"}


async def test_existing_plan_keys_missing_from_the_cache_are_kept(api: Api, namespace: str) -> None:
    key, secret = EndpointKey(namespace, "chat"), body(namespace, "Secret", old="eA==")
    assert await Cluster(api, ClusterCache(nodes=False)).apply_endpoint(
        key, EndpointPlan(apply=(secret,))
    )
    late = Cluster(api, ClusterCache(nodes=False))
    new = body(namespace, "Secret", new="eQ==")
    assert not await late.apply_endpoint(key, EndpointPlan(apply=(new,)))
    assert not late.cache.child_failures[key]
    assert (await api.get(SECRETS, "chat-x", namespace))["data"] == {"old": "eA=="}
    (child,) = late.observe_endpoint(key).children.values()
    assert child["data"] == {"old": "eA=="}


def service(namespace: str, **metadata: object) -> Object:
    full_metadata = {"name": "chat", "namespace": namespace, **metadata}
    spec = {"ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": full_metadata, "spec": spec}


async def test_a_service_that_replaced_ours_gets_no_note_and_is_not_deleted(
    api: Api, namespace: str
) -> None:
    key, ref = EndpointKey(namespace, "chat"), ObjectRef("v1", "Service", "chat")
    cluster = Cluster(api, ClusterCache(nodes=False))
    ours = service(namespace, labels={labels.ENDPOINT: "chat"})
    cluster.cache.upsert_child(await api.create(SERVICES, ours))
    await api.delete(SERVICES, "chat", namespace)
    theirs = await api.create(SERVICES, service(namespace))
    assert await cluster.apply_endpoint(key, EndpointPlan(notes={"chat": "x"}, delete=(ref,)))
    live = await api.get(SERVICES, "chat", namespace)
    assert live["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert "annotations" not in live["metadata"]


async def test_a_refused_note_is_a_failure_and_holds_up_no_deletion(
    api: Api, namespace: str
) -> None:
    key, ref = EndpointKey(namespace, "chat"), ObjectRef("v1", "Service", "chat")
    cluster = Cluster(api, ClusterCache(nodes=False))
    marks = {labels.ENDPOINT: "chat"}
    cluster.cache.upsert_child(await api.create(SERVICES, service(namespace, labels=marks)))
    config = await api.create(CONFIG_MAPS, body(namespace, "ConfigMap"))
    cluster.cache.upsert_child(config)
    # Annotations have a limit of 256 KiB.
    notes = {"chat": "x" * (1 << 18)}
    plan = EndpointPlan(notes=notes, delete=(ObjectRef("v1", "ConfigMap", "chat-x"),))
    assert not await cluster.apply_endpoint(key, plan)
    assert cluster.cache.child_failures[key][ref].reason == "Refused"
    with pytest.raises(NotFound):
        await api.get(CONFIG_MAPS, "chat-x", namespace)


async def test_a_service_that_someone_has_taken_over_is_not_overwritten(
    api: Api, namespace: str
) -> None:
    key, ref = EndpointKey(namespace, "chat"), ObjectRef("v1", "Service", "chat")
    observed = endpoint(decode(), key=key)
    plan = EndpointPlan(
        apply=tuple(
            planned
            for planned in plan_endpoint(observed, RouterSettings()).apply
            if ObjectRef.of(planned) == ref
        )
    )
    cluster = Cluster(api, ClusterCache(nodes=False))
    assert await cluster.apply_endpoint(key, plan)
    theirs: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": {"selector": {"app": "theirs"}},
    }
    cluster.cache.upsert_child(await api.apply(SERVICES, theirs, manager="theirs", force=True))
    assert not await cluster.apply_endpoint(key, plan)
    assert cluster.cache.child_failures[key][ref].reason == "NameTaken"
    live = await api.get(SERVICES, "chat", namespace)
    assert live["spec"]["selector"] == theirs["spec"]["selector"]
