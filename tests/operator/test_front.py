"""routing.front: what is planned for a router in place of Envoy and EPP, and how fronts change."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import labels, ports
from tandem_operator.observed import Body, Failure
from tandem_operator.resources.schema import defaulted, problems
from tandem_operator.routing.endpoint.observed import (
    EndpointPlan,
    ObjectRef,
    ObservedEndpoint,
    UnreadablePool,
)
from tandem_operator.routing.endpoint.plan import plan_endpoint, router_state
from tandem_operator.routing.endpoint.requirements import combine_requirements, find_conflicts
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.routing.endpoint.unused import own_children, plan_unused

from .endpoints import by_name, decode, endpoint, unified, with_children
from .pool_yaml import decode_pool
from .reachability import Source, may_connect
from .test_policies import POLICY

SETTINGS = RouterSettings(tandem_image="tandem:test")
ROUTER = {"front": "router"}
SERVICE = ObjectRef("v1", "Service", "chat")
DEPLOYMENT = ObjectRef("apps/v1", "Deployment", "chat-router")
SHARED = {
    ("Secret", "chat-plan-keys"),
    *((kind, "chat-epp") for kind in ("ServiceAccount", "Role", "RoleBinding")),
}
"""Both fronts have these."""
OF_ROUTER = {
    ("Service", "chat-router-peers"),
    *((kind, "chat-router") for kind in ("ConfigMap", "Deployment", "PodDisruptionBudget")),
}
OF_ENVOY = {
    *(("Service", name) for name in ("chat-epp", "chat-epp-pods", "chat-epp-peers", "chat-decode")),
    *(
        (kind, name)
        for kind in ("ConfigMap", "Deployment", "PodDisruptionBudget")
        for name in ("chat-epp", "chat-envoy")
    ),
}


def routed(**routing: Any) -> ObservedEndpoint:
    return endpoint(decode(routing={**ROUTER, **routing}))


def names(refs: Any) -> set[tuple[str, str]]:
    return {(ref.kind, ref.name) for ref in refs}


def planned(observed: ObservedEndpoint) -> EndpointPlan:
    return plan_endpoint(observed, SETTINGS)


def settled(
    observed: ObservedEndpoint, available: int = 2, settings: RouterSettings = SETTINGS
) -> ObservedEndpoint:
    """The endpoint after the plan's writes, with so many available pods of each Deployment; those
    that are to end still have some."""
    plan = plan_endpoint(observed, settings)
    bodies: list[Body] = []
    for body in plan.apply:
        is_deployment = body["kind"] == "Deployment"
        status = {"status": {"availableReplicas": available}} if is_deployment else {}
        bodies.append({**body, **status})
    for ref in plan.end:
        body = observed.children[ref]
        metadata = {**body["metadata"], "deletionTimestamp": "2027-01-15T08:00:00Z"}
        bodies.append({**body, "metadata": metadata})
    after = with_children(observed, bodies)
    return replace(
        after,
        children={ref: body for ref, body in after.children.items() if ref not in plan.delete},
    )


def drained(observed: ObservedEndpoint) -> ObservedEndpoint:
    """The endpoint after the last pod of each Deployment that is being deleted."""
    children = observed.children.items()
    left = {ref: body for ref, body in children if "deletionTimestamp" not in body["metadata"]}
    return replace(observed, children=left)


def without_service(observed: ObservedEndpoint) -> ObservedEndpoint:
    left = {ref: body for ref, body in observed.children.items() if ref != SERVICE}
    return replace(observed, children=left)


def selected(observed: ObservedEndpoint) -> str:
    component: str = observed.children[SERVICE]["spec"]["selector"][labels.COMPONENT]
    return component


def test_the_router_takes_the_place_of_envoy_and_epp() -> None:
    refs = [ObjectRef.of(body) for body in planned(routed()).apply]
    assert names(refs) == {*SHARED, *OF_ROUTER, ("Service", "chat")}
    kinds = [(ref.kind, ref.name) for ref in refs]
    assert kinds[:4] == [
        ("Secret", "chat-plan-keys"),
        *((kind, "chat-epp") for kind in ("ServiceAccount", "Role", "RoleBinding")),
    ], "what pods need comes before them"
    after = settled(routed())
    assert selected(after) == "router"
    assert (planned(after).apply, planned(after).delete) == ((), ())


def test_the_router_has_the_settings_of_the_epp_and_the_longest_drain() -> None:
    config = {"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]}
    variables = [{"name": "A", "value": "b"}]
    pool = decode(
        routing={
            **ROUTER,
            "epp": {"config": config, "replicas": 3, "image": "own:1", "env": variables},
            "resume": {"enabled": "always"},
            "maxRequestBytes": 1 << 26,
            "apiPaths": ["/version"],
        },
        drain={"timeout": "100s"},
        sidecar={"prefillTimeout": "5s"},
    )
    objects = by_name(planned(endpoint(pool)).apply)
    document = json.loads(
        objects[ObjectRef("v1", "ConfigMap", "chat-router")]["data"]["router.yaml"]
    )
    assert document["plugins"] == config["plugins"]
    assert document["resume"] == {"enabled": True, "max_regeneration": "10s", "max_moves": 2}
    assert document["disaggregated_serving"]["api_paths"] == ["/version"]
    spec = objects[DEPLOYMENT]["spec"]
    assert spec["replicas"] == 3
    pods = spec["template"]["spec"]
    assert pods["terminationGracePeriodSeconds"] == 5 + 100 + 15
    [container] = pods["containers"]
    assert (container["image"], container["env"]) == ("own:1", variables)
    flags = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert flags["--max-body"] == str(1 << 26)
    assert flags["--drain-timeout"] == "100s"
    assert flags["--peers"] == "chat-router-peers.default.svc:9005"


KEYED = {"envoy": {"apiKeySecretRef": {"name": "clients"}}}


def test_the_router_asks_clients_for_the_keys_of_the_secret() -> None:
    pods = by_name(planned(routed(**KEYED)).apply)[DEPLOYMENT]["spec"]["template"]["spec"]
    [volume] = [volume for volume in pods["volumes"] if volume["name"] == "api-key-secret"]
    assert volume["secret"] == {"secretName": "clients"}
    [container] = pods["containers"]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == "api-key-secret"]
    given = container["args"].index("--api-key-dir") + 1
    assert (container["args"][given], mount["readOnly"]) == (mount["mountPath"], True)
    without = by_name(planned(routed()).apply)[DEPLOYMENT]["spec"]["template"]["spec"]
    assert "--api-key-dir" not in without["containers"][0]["args"]


def test_a_pool_that_cannot_be_read_opens_no_router_to_clients_without_keys() -> None:
    keyed, plain = decode("a", routing={**ROUTER, **KEYED}), decode("b", routing=ROUTER)
    before = settled(endpoint(keyed, plain))
    broken = (UnreadablePool("uid-a", "a"),)
    after = replace(before, pools=endpoint(plain).pools, unreadable_pools=broken)
    bodies = by_name(settled(after).children.values())
    volumes = bodies[DEPLOYMENT]["spec"]["template"]["spec"]["volumes"]
    assert "api-key-secret" in [volume["name"] for volume in volumes]


def test_the_router_has_the_certificates_of_the_endpoint() -> None:
    objects = by_name(planned(routed(tls={"secretName": "chat-tls"})).apply)
    pods = objects[DEPLOYMENT]["spec"]["template"]["spec"]
    [container] = pods["containers"]
    [mount] = [m for m in container["volumeMounts"] if m["name"] == "tls"]
    assert container["args"][container["args"].index("--mutual-tls") + 1] == mount["mountPath"]
    assert {"name": "tls", "secret": {"secretName": "chat-tls"}}.items() <= next(
        volume for volume in pods["volumes"] if volume["name"] == "tls"
    ).items()


def test_the_front_changes_once_all_pods_of_the_next_one_are_available() -> None:
    before = settled(endpoint())
    asked = replace(routed(), children=before.children)
    plan = planned(asked)
    assert names(map(ObjectRef.of, plan.apply)) == OF_ROUTER
    assert plan.delete == ()
    for available in (0, 1):
        waiting = settled(asked, available)
        assert selected(waiting) == "envoy"
        assert (planned(waiting).apply, planned(waiting).delete) == ((), ())
        state = router_state(waiting)
        assert (state.ready, state.reason) == (False, "FrontChanging")
        assert f"{available} of 2 pods of Deployment chat-router are available" in state.message
    changing = settled(asked)
    plan = planned(changing)
    assert names(map(ObjectRef.of, plan.apply)) == {("Service", "chat")}
    moved = settled(changing)
    assert names(planned(moved).end) == {("Deployment", "chat-envoy")}
    draining = settled(moved)
    for observed in (moved, draining):
        assert (planned(observed).apply, planned(observed).delete) == ((), ())
        assert router_state(observed).reason == "RouterReady"
    assert planned(draining).end == ()
    without_envoy = drained(draining)
    plan = planned(without_envoy)
    assert (plan.apply, plan.delete) == ((), ())
    assert names(plan.end) == {("Deployment", "chat-epp")}, "Envoys that drain have asked it"
    without_pods = drained(settled(without_envoy))
    plan = planned(without_pods)
    assert (plan.apply, plan.end) == ((), ())
    assert names(plan.delete) == OF_ENVOY - {(k, n) for k, n in OF_ENVOY if k == "Deployment"}
    after = settled(without_pods)
    assert names(after.children) == {*SHARED, *OF_ROUTER, ("Service", "chat")}
    assert selected(after) == "router"
    assert (planned(after).apply, planned(after).delete) == ((), ())
    assert router_state(after).reason == "RouterReady"


def test_the_front_changes_back_once_envoy_and_epp_are_available() -> None:
    before = settled(routed())
    asked = replace(endpoint(), children=before.children)
    half = settled(asked, 0)
    assert selected(half) == "router"
    assert "the router serves until all are" in router_state(half).message
    changing = settled(asked)
    plan = planned(changing)
    assert names(map(ObjectRef.of, plan.apply)) == {("Service", "chat")}
    moved = settled(changing)
    assert selected(moved) == "envoy"
    assert names(planned(moved).end) == {("Deployment", "chat-router")}
    draining = settled(moved)
    assert (planned(draining).apply, planned(draining).delete) == ((), ())
    assert names(planned(drained(draining)).delete) == OF_ROUTER - {("Deployment", "chat-router")}


def test_a_front_whose_deployment_is_being_deleted_is_not_available() -> None:
    before = settled(endpoint())
    moved = settled(settled(replace(routed(), children=before.children)))
    draining = replace(settled(moved), pools=endpoint().pools)
    waiting = settled(draining)
    assert (selected(waiting), planned(waiting).end, planned(waiting).delete) == ("router", (), ())
    assert "0 of 2 pods of Deployment chat-envoy" in router_state(waiting).message
    again = settled(drained(waiting), 0)
    assert ObjectRef("apps/v1", "Deployment", "chat-envoy") in again.children
    assert selected(again) == "router"
    assert selected(settled(settled(drained(waiting)))) == "envoy"


def test_the_policies_of_a_front_stay_until_its_pods_have_ended() -> None:
    settings = replace(SETTINGS, network_policy=POLICY)
    before = settled(endpoint(), settings=settings)
    starting = settled(replace(routed(), children=before.children), settings=settings)
    moved = settled(starting, settings=settings)
    draining = settled(moved, settings=settings)
    without_envoy = settled(drained(draining), settings=settings)
    for observed in (moved, draining, without_envoy):
        policies = {name for kind, name in names(observed.children) if kind == "NetworkPolicy"}
        assert {"chat-envoy", "chat-epp", "chat-router"} <= policies
        assert plan_endpoint(observed, settings).delete == ()
    after = settled(drained(without_envoy), settings=settings)
    left = {name for kind, name in names(after.children) if kind == "NetworkPolicy"}
    assert left & {"chat-envoy", "chat-epp", "chat-router"} == {"chat-router"}


@pytest.mark.parametrize(("now", "asked"), [({}, ROUTER), (ROUTER, {})])
def test_no_front_ends_before_the_service_is_known_to_select_the_other(
    now: dict[str, str], asked: dict[str, str]
) -> None:
    before = settled(endpoint(decode(routing=now)))
    changing = settled(replace(endpoint(decode(routing=asked)), children=before.children))
    refused = replace(changing, failures={SERVICE: Failure("Refused", "exceeded quota")})
    for observed in (changing, refused, without_service(changing)):
        plan = planned(observed)
        assert names(map(ObjectRef.of, plan.apply)) == {("Service", "chat")}
        assert plan.delete == ()
        assert plan.requeue_after == 1.0, "the answer to the write is no event"
    assert router_state(refused).reason == "Refused"


def test_a_service_without_a_front_gets_the_wanted_one_at_once() -> None:
    before = settled(endpoint())
    unused = replace(before, pools=())
    gone = plan_unused(unused).delete
    left = {ref: body for ref, body in before.children.items() if ref not in gone}
    assert SERVICE in left
    after = settled(replace(routed(), children=left))
    assert selected(after) == "router"
    deployments = {name for kind, name in names(after.children) if kind == "Deployment"}
    assert deployments == {"chat-router"}


def test_one_pool_that_says_envoy_keeps_envoy() -> None:
    keyed = {"envoy": {"apiKeySecretRef": {"name": "clients"}}}
    both = endpoint(decode("a", routing=ROUTER), unified("b", routing=keyed))
    assert combine_requirements(both.pools).front == "envoy"
    [line] = [line for line in find_conflicts(both.pools) if "routing.front" in line]
    assert line.startswith('routing.front is "router" in a, "envoy" in b: "envoy" is used')
    assert names(map(ObjectRef.of, planned(both).apply)) == {
        *SHARED,
        *OF_ENVOY,
        ("Service", "chat"),
    }


@pytest.mark.parametrize(("now", "asked"), [({}, ROUTER), (ROUTER, {})])
def test_the_front_stays_while_a_pool_cannot_be_read(
    now: dict[str, str], asked: dict[str, str]
) -> None:
    before = settled(endpoint(decode("a", routing=now)))
    unread = (UnreadablePool("uid-b", "b"),)
    observed = endpoint(
        decode("a", routing=asked), children=before.children, unreadable_pools=unread
    )
    plan = planned(observed)
    assert "Deployment" not in {kind for kind, name in names(map(ObjectRef.of, plan.apply))} or all(
        ObjectRef.of(body) in before.children for body in plan.apply
    )
    assert plan.delete == ()
    alone = replace(observed, pools=())
    programs = "its routers" if now else "Envoy and EPP"
    assert programs in router_state(alone).message
    assert router_state(alone).url == "http://chat.default.svc:8080"


@pytest.mark.parametrize(("now", "asked"), [({}, ROUTER), (ROUTER, {})])
def test_a_front_without_its_service_stays_while_a_pool_cannot_be_read(
    now: dict[str, str], asked: dict[str, str]
) -> None:
    before = settled(endpoint(decode("a", routing=now)))
    observed = endpoint(
        decode("a", routing=asked),
        children=without_service(before).children,
        unreadable_pools=(UnreadablePool("uid-b", "b"),),
    )
    assert selected(settled(observed)) == ("router" if now else "envoy")
    both = {**settled(endpoint()).children, **before.children}
    undecided = without_service(replace(observed, children=both))
    assert selected(settled(undecided)) == "envoy", "the pool may ask for keys"


def test_routers_that_are_not_available_are_reported() -> None:
    assert router_state(routed()).reason == "Pending"
    state = router_state(settled(routed(), 0))
    assert (state.ready, state.reason) == (False, "RouterUnavailable")
    assert "Deployment chat-router" in state.message
    assert state.url == "http://chat.default.svc:8080"


def test_all_of_a_router_but_address_and_keys_goes_with_the_last_pool() -> None:
    unused = replace(settled(routed()), pools=())
    assert SERVICE in own_children(unused), "a Service of a router is not someone else's"
    plan = plan_unused(unused)
    assert names(plan.delete) == {*OF_ROUTER, *SHARED} - {("Secret", "chat-plan-keys")}


def test_policies_let_every_front_in_whichever_serves() -> None:
    settings = replace(SETTINGS, network_policy=POLICY)
    for routing, own in (({}, {"chat-envoy", "chat-epp"}), (ROUTER, {"chat-router"})):
        bodies = plan_endpoint(endpoint(decode(routing=routing)), settings).apply
        policies = {b["metadata"]["name"]: b for b in bodies if b["kind"] == "NetworkPolicy"}
        fronts = {"chat-envoy", "chat-epp", "chat-router"}
        assert {*policies} & fronts == own
        [to_sidecar, *_] = policies["chat-decode"]["spec"]["ingress"]
        allowed = [
            peer["podSelector"]["matchLabels"][labels.COMPONENT]
            for peer in to_sidecar["from"]
            if "podSelector" in peer
        ]
        assert allowed == ["envoy", "router"]


def test_everyone_reaches_the_router_for_requests_and_only_routers_and_monitors_else() -> None:
    settings = replace(SETTINGS, network_policy=POLICY)
    objects = by_name(plan_endpoint(routed(), settings).apply)
    policies = [body for ref, body in objects.items() if ref.kind == "NetworkPolicy"]
    router = Source("default", objects[DEPLOYMENT]["spec"]["template"]["metadata"]["labels"])
    client, prometheus = Source("other", {"app": "client"}), Source("monitoring", {"app": "p"})

    def reached_by(port: int) -> list[bool]:
        return [may_connect(policies, s, router, port) for s in (client, prometheus, router)]

    assert reached_by(ports.ROUTER) == [True, True, True]
    assert reached_by(ports.ROUTER_ADMIN) == [False, True, False]
    assert reached_by(ports.EPP_PEERS) == [False, False, True]


@pytest.mark.parametrize(
    "routing",
    [
        {"inferencePool": {"enabled": True}},
        {"inferencePool": {"enabled": True}, "gatewayRef": {"name": "g"}},
        {"envoy": {"enabled": False}},
        {"epp": {"enabled": False}},
    ],
)
def test_what_the_router_does_not_serve_is_refused(routing: dict[str, Any]) -> None:
    def found(front: str) -> list[str]:
        body = decode_pool(routing={"front": front, **routing})
        messages = [
            problem.message for problem in problems("DecodePool", defaulted("DecodePool", body))
        ]
        return [message for message in messages if "front: envoy" in message]

    assert len(found("router")) == 1
    assert found("envoy") == []


def test_the_front_changes_no_revision_of_the_pool() -> None:
    assert decode(routing=ROUTER).revision == decode().revision
