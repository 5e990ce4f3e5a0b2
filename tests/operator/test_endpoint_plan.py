"""plan_endpoint and router_state: what is written for an endpoint and what is reported."""

import json
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.commandline import parse_host_port
from tandem_contract.config import FlowBand, FlowControl, HealthChecks, load_router_config
from tandem_contract.plan import ResumeLimits, key_id
from tandem_contract.slo import Slo
from tandem_operator.observed import Body, Failure
from tandem_operator.routing.endpoint.observed import (
    CHILD_KINDS,
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    OPTIONAL_KINDS,
    EndpointPlan,
    ObjectRef,
    ObservedEndpoint,
    UnreadablePool,
)
from tandem_operator.routing.endpoint.plan import plan_endpoint, router_state
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.routing.objects.common import kept_objects

from .endpoints import NOW, SECRET, by_name, decode, endpoint, unified, with_children

SETTINGS = RouterSettings(tandem_image="tandem:test")
KEYS = ObjectRef("v1", "Secret", "chat-plan-keys")
ENVOY = ObjectRef("apps/v1", "Deployment", "chat-envoy")
EPP = ObjectRef("apps/v1", "Deployment", "chat-epp")
EPP_FILE = ObjectRef("v1", "ConfigMap", "chat-epp")


def planned(observed: ObservedEndpoint) -> dict[ObjectRef, Any]:
    return by_name(plan_endpoint(observed, SETTINGS).apply)


def settled(observed: ObservedEndpoint, **status: int) -> ObservedEndpoint:
    """The endpoint after all writes, its Deployments with these numbers of available pods."""
    bodies: list[Body] = []
    for ref, body in planned(observed).items():
        available = status.get(ref.name.removeprefix("chat-"), 1)
        state = {"status": {"availableReplicas": available}} if ref.kind == "Deployment" else {}
        bodies.append({**body, **state})
    return with_children(observed, bodies)


def _file(objects: dict[ObjectRef, Any]) -> Any:
    """The EPP's."""
    return json.loads(objects[EPP_FILE]["data"]["router.yaml"])


def bootstrap(objects: dict[ObjectRef, Any]) -> Any:
    return json.loads(objects[ObjectRef("v1", "ConfigMap", "chat-envoy")]["data"]["envoy.json"])


def test_all_objects_are_planned_with_dependencies_first() -> None:
    names = [(ref.kind, ref.name) for ref in planned(endpoint())]
    assert names == [
        ("Secret", "chat-plan-keys"),
        ("ServiceAccount", "chat-epp"),
        ("Role", "chat-epp"),
        ("RoleBinding", "chat-epp"),
        ("Service", "chat-epp"),
        ("Service", "chat-epp-pods"),
        ("Service", "chat-epp-peers"),
        ("ConfigMap", "chat-epp"),
        ("Deployment", "chat-epp"),
        ("PodDisruptionBudget", "chat-epp"),
        ("Service", "chat"),
        ("Service", "chat-decode"),
        ("ConfigMap", "chat-envoy"),
        ("Deployment", "chat-envoy"),
        ("PodDisruptionBudget", "chat-envoy"),
    ]


def test_all_objects_are_watched_kinds_labelled_and_owned_by_every_pool_or_none() -> None:
    pools = (decode("b"), unified("a"))
    observed = endpoint(
        *pools, unreadable_pools=(UnreadablePool("uid-c", "c"),), kinds=frozenset(OPTIONAL_KINDS)
    )
    for ref, body in planned(observed).items():
        assert (ref.api_version, ref.kind) in (*CHILD_KINDS, *OPTIONAL_KINDS)
        metadata = body["metadata"]
        assert metadata["labels"][labels.ENDPOINT] == "chat"
        assert metadata["labels"][labels.MANAGED_BY] == "tandem-operator"
        owners = [(owner["name"], owner["uid"]) for owner in metadata["ownerReferences"]]
        every = [("a", "uid-a"), ("b", "uid-b"), ("c", "uid-c")]
        assert owners == ([] if ref in kept_objects("chat") else every)
        assert not any("controller" in owner for owner in metadata["ownerReferences"])


def test_a_complete_endpoint_needs_no_writes() -> None:
    observed = settled(endpoint())
    plan = plan_endpoint(observed, SETTINGS)
    assert (plan.apply, plan.delete) == ((), ())
    assert plan.requeue_after == pytest.approx(24 * 3600 - 300)


def test_adding_or_removing_a_pool_changes_only_owners() -> None:
    before = settled(endpoint(decode("a"), decode("b")))
    after = endpoint(decode("b"), children=before.children)
    changed = planned(after)
    assert set(changed) == set(before.children) - {*kept_objects("chat")}
    for ref, body in changed.items():
        old_metadata = {**before.children[ref]["metadata"], "ownerReferences": None}
        assert {**body["metadata"], "ownerReferences": None} == old_metadata


def test_the_first_key_signs_at_once_and_the_next_is_added_to_it() -> None:
    observed = endpoint()
    (secret,) = (body for ref, body in planned(observed).items() if ref == KEYS)
    assert {name: b64decode(v) for name, v in secret["data"].items()} == {
        key_id(NOW): SECRET.hex().encode()
    }
    due = replace(settled(observed), now=NOW + 24 * 3600 - 300, secret=SECRET[::-1])
    changed = planned(due)
    assert list(changed) == [KEYS]
    assert set(changed[KEYS]["data"]) == {key_id(NOW), key_id(NOW + 24 * 3600)}


def test_objects_that_no_pool_requires_are_deleted() -> None:
    routing = {"epp": {"enabled": False}}
    observed = endpoint(decode(routing=routing), children=settled(endpoint()).children)
    plan = plan_endpoint(observed, SETTINGS)
    deleted = {(ref.kind, ref.name) for ref in plan.delete}
    assert deleted == {
        ("Secret", "chat-plan-keys"),
        *(("Service", name) for name in ("chat-epp", "chat-epp-pods", "chat-epp-peers")),
        *((kind, "chat-epp") for kind in ("ServiceAccount", "Role", "RoleBinding")),
        *((kind, "chat-epp") for kind in ("ConfigMap", "Deployment", "PodDisruptionBudget")),
    }
    assert plan.requeue_after is None


KEYED = {"envoy": {"enabled": True, "apiKeySecretRef": {"name": "clients"}}}


def _asks_for_keys(objects: dict[ObjectRef, Any]) -> bool:
    filters = [each["name"] for each in _manager(bootstrap(objects))["http_filters"]]
    spec = objects[ENVOY]["spec"]["template"]["spec"]
    has_program = "api-keys" in [each["name"] for each in spec["initContainers"]]
    mounted = [v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v]
    assert mounted == (["clients"] if has_program else [])
    assert ("envoy.filters.http.api_key_auth" in filters) is has_program
    return has_program


def _manager(config: Any) -> Any:
    (listener,) = (x for x in config["static_resources"]["listeners"] if x["name"] == "clients")
    return listener["filter_chains"][0]["filters"][0]["typed_config"]


def test_envoy_asks_for_keys_if_any_pool_names_a_secret() -> None:
    assert not _asks_for_keys(planned(endpoint(decode("a"))))
    objects = planned(endpoint(decode("a"), decode("b", routing=KEYED)))
    assert _asks_for_keys(objects)
    names = [each["name"] for each in objects[ENVOY]["spec"]["template"]["spec"]["initContainers"]]
    assert names == ["api-keys", "envoy"], "Envoy does not start without the file"


def test_a_pool_that_cannot_be_read_any_more_does_not_open_the_endpoint() -> None:
    before = settled(endpoint(decode("a"), decode("b", routing=KEYED)))
    broken = replace(
        endpoint(decode("a")),
        children=before.children,
        unreadable_pools=(UnreadablePool("uid-b", "b"),),
    )
    changed = {**before.children, **planned(broken)}
    assert _asks_for_keys(changed)
    # Only the pool itself can say that keys are no longer asked for.
    assert not _asks_for_keys(planned(replace(endpoint(decode("a")), children=before.children)))


@pytest.mark.parametrize("mode", ["never", "always"])
def test_resume_stays_as_it_is_while_a_pool_cannot_be_read(mode: str) -> None:
    """The default, or another pool's word, must not override the word of one that has an error."""
    other = {"resume": {"enabled": "always" if mode == "never" else "never"}}
    states = endpoint(decode("a", routing={"resume": {"enabled": mode}}), decode("b"))
    before = settled(states)
    for routing in ({}, other):
        broken = replace(
            endpoint(decode("b", routing=routing)),
            children=before.children,
            unreadable_pools=(UnreadablePool("uid-a", "a"),),
        )
        assert ("resume" in _file({**before.children, **planned(broken)})) is (mode == "always")
    text = {**before.children[EPP_FILE], "data": {"router.yaml": "{"}}
    silent = endpoint(decode("b"), unreadable_pools=broken.unreadable_pools)
    edited = replace(silent, children={**before.children, EPP_FILE: text})
    assert "resume" in _file(planned(edited)), "no file of ours: what the readable pools say"


@pytest.mark.parametrize(
    ("routing", "section"),
    [
        ({"flowControl": {"enabled": True}}, "flow_control"),
        ({"slo": {"ttft": "2s"}}, "slo"),
    ],
)
def test_flow_control_and_objectives_stay_as_they_are_while_a_pool_cannot_be_read(
    routing: dict[str, Any], section: str
) -> None:
    before = settled(endpoint(decode("a", routing=routing), decode("b")))
    broken = replace(
        endpoint(decode("b")),
        children=before.children,
        unreadable_pools=(UnreadablePool("uid-a", "a"),),
    )
    assert section in _file({**before.children, **planned(broken)})


def test_an_unreadable_pool_prevents_deletions() -> None:
    children = settled(endpoint()).children
    unread = (UnreadablePool("uid-x", "x"),)
    alone = replace(endpoint(), pools=(), unreadable_pools=unread, children=children)
    assert plan_endpoint(alone, SETTINGS) == EndpointPlan()
    routing = {"envoy": {"enabled": False}}
    beside = endpoint(decode(routing=routing), unreadable_pools=unread, children=children)
    assert plan_endpoint(beside, SETTINGS).delete == ()


def test_the_epp_loads_its_rendered_configuration(tmp_path: Path) -> None:
    config = {"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]}
    checks = {"path": "/health", "unhealthyThreshold": 2}
    routing = {
        "epp": {"config": config, "replicas": 3, "healthChecks": checks},
        "resume": {"enabled": "always", "maxMoves": 1},
        "flowControl": {"enabled": True, "noEndpointTTL": "1s", "bands": [{"priority": 1}]},
        "slo": {"ttft": "2s", "attainment": 0.5},
    }
    objects = planned(endpoint(decode(routing=routing, sidecar={"prefillTimeout": "5s"})))
    file = tmp_path / "router.yaml"
    file.write_text(objects[EPP_FILE]["data"]["router.yaml"])
    loaded = load_router_config(file)
    assert loaded.disaggregated_serving.enabled
    assert loaded.disaggregated_serving.prefill_timeout is None
    assert loaded.extra == config
    assert loaded.health_checks == HealthChecks(path="/health", unhealthy_threshold=2)
    assert loaded.resume.limits == ResumeLimits(10.0, 1)
    assert loaded.flow_control == FlowControl(
        enabled=True, no_endpoint_ttl=1.0, bands=(FlowBand(priority=1),), models=("org/model",)
    )
    assert {*loaded.slo.values()} == {Slo(2.0, None, 0.5)}
    assert objects[EPP]["spec"]["replicas"] == 3


def test_a_changed_bootstrap_rolls_envoy_and_a_changed_config_does_not_roll_the_epp() -> None:
    def templates(observed: ObservedEndpoint) -> tuple[Any, Any]:
        objects = planned(observed)
        return tuple(objects[ref]["spec"]["template"] for ref in (ENVOY, EPP))  # type: ignore[return-value]  # two of them

    envoy, epp = templates(endpoint())
    limits = {"limits": {"memory": "2Gi"}}
    objects = by_name(plan_endpoint(endpoint(), replace(SETTINGS, envoy_resources=limits)).apply)
    hashes = [
        template["metadata"]["annotations"][labels.CONFIG_HASH]
        for template in (envoy, objects[ENVOY]["spec"]["template"])
    ]
    assert hashes[0] != hashes[1]
    patient = decode(sidecar={"prefillTimeout": "5s"})
    assert templates(endpoint(patient)) == (envoy, epp)
    changes: list[dict[str, Any]] = [
        {"resume": {"enabled": "always"}},
        {"flowControl": {"enabled": True}},
        {"slo": {"ttft": "2s"}},
    ]
    for routing in changes:
        assert templates(endpoint(decode(routing=routing))) == (envoy, epp)


def test_the_epps_pods_find_each_other_and_authenticate_by_the_plan_keys() -> None:
    objects = planned(endpoint())
    deployment = objects[ObjectRef("apps/v1", "Deployment", "chat-epp")]
    assert deployment["spec"]["replicas"] == 2
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    peers = parse_host_port(arguments[arguments.index("--peers") + 1])
    assert peers.host == "chat-epp-peers.default.svc"
    service = objects[ObjectRef("v1", "Service", "chat-epp-peers")]["spec"]
    assert service["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert service["ports"][0]["targetPort"] == peers.port
    assert peers.port in [port["containerPort"] for port in container["ports"]]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert "--plan-key-dir" in arguments


def test_split_off_changes_only_the_configuration_that_the_epp_reloads(tmp_path: Path) -> None:
    on, off = planned(endpoint()), planned(endpoint(decode(routing={"split": "off"})))
    config = ObjectRef("v1", "ConfigMap", "chat-epp")
    assert {ref for ref in on if on[ref] != off[ref]} == {config}
    for objects, enabled in ((on, True), (off, False)):
        file = tmp_path / "router.yaml"
        file.write_text(objects[config]["data"]["router.yaml"])
        assert load_router_config(file).disaggregated_serving.enabled is enabled


def test_envoy_resolves_our_epp_pods_or_a_foreign_epps_service() -> None:
    def epp(observed: ObservedEndpoint) -> Any:
        clusters = {
            c["name"]: c for c in bootstrap(planned(observed))["static_resources"]["clusters"]
        }
        (host,) = clusters["epp"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        return host["endpoint"]["address"]["socket_address"]

    assert epp(endpoint()) == {"address": "chat-epp-pods.default.svc", "port_value": 9002}
    foreign = endpoint(decode(routing={"epp": {"enabled": False}}))
    assert epp(foreign) == {"address": "chat-epp.default.svc", "port_value": 9002}


def test_the_fallback_service_selects_decode_pods_by_label() -> None:
    service = planned(endpoint())[ObjectRef("v1", "Service", "chat-decode")]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"endpoint.tandem.dev/chat": "decode"}


def test_envoys_grace_period_follows_the_longest_drain_timeout() -> None:
    observed = endpoint(decode("a", drain={"timeout": "10m"}), decode("b"))
    spec = planned(observed)[ENVOY]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 615
    assert spec["containers"][0]["command"][-1] == "600"
    assert [(c["name"], c["restartPolicy"]) for c in spec["initContainers"]] == [
        ("envoy", "Always")
    ]


ASKED = {"inferencePool": {"enabled": True}, "gatewayRef": {"name": "g"}}


@pytest.mark.parametrize("kind", [INFERENCE_POOL, INFERENCE_POOL_ALPHA])
def test_the_inference_pool_has_a_version_that_the_cluster_serves(kind: tuple[str, str]) -> None:
    observed = endpoint(decode(routing=ASKED), kinds=frozenset({kind, HTTP_ROUTE}))
    objects = planned(observed)
    assert ObjectRef(*kind, "chat") in objects
    route = objects[ObjectRef(*HTTP_ROUTE, "chat")]["spec"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert backend["group"] == kind[0].split("/")[0]


@pytest.mark.parametrize("is_pool", [True, False])
def test_the_epp_of_an_inference_pool_serves_gateways_and_what_refers_to_it(is_pool: bool) -> None:
    objects = planned(endpoint(decode(routing=ASKED if is_pool else {})))
    role = objects[ObjectRef("rbac.authorization.k8s.io/v1", "Role", "chat-epp")]
    resources = {kind for rule in role["rules"] for kind in rule["resources"]}
    pod = objects[ObjectRef("apps/v1", "Deployment", "chat-epp")]["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    if is_pool:
        kinds = {"inferencemodelrewrites", "inferenceobjectives", "inferencepools"}
        assert resources == {"pods", *kinds}
        assert arguments[arguments.index("--inference-pool") + 1] == "chat"
        assert "--accept-tls" in arguments
    else:
        assert resources == {"pods"}
        assert not {"--inference-pool", "--accept-tls"} & set(arguments)


def test_endpoints_behind_one_gateway_are_told_apart_by_their_routes() -> None:
    kinds = frozenset({INFERENCE_POOL, HTTP_ROUTE})
    match = {"path": {"value": "/v1"}, "headers": [{"name": "x-tenant", "value": "blue"}]}
    limits = {"hostnames": ["chat.example.com"], "matches": [match]}
    routing = {**ASKED, "gatewayRef": {"name": "g", **limits}}
    observed = endpoint(decode(routing=routing), kinds=kinds)
    spec = planned(observed)[ObjectRef(*HTTP_ROUTE, "chat")]["spec"]
    assert spec["hostnames"] == ["chat.example.com"]
    (rule,) = spec["rules"]
    assert rule["matches"] == [
        {
            "path": {"type": "PathPrefix", "value": "/v1"},
            "headers": [{"name": "x-tenant", "value": "blue"}],
        }
    ]
    unlimited = planned(endpoint(decode(routing=ASKED), kinds=kinds))
    spec = unlimited[ObjectRef(*HTTP_ROUTE, "chat")]["spec"]
    assert "hostnames" not in spec
    assert "matches" not in spec["rules"][0]


def test_no_inference_pool_unless_enabled_and_served() -> None:
    both = frozenset(OPTIONAL_KINDS)
    assert not {r.kind for r in planned(endpoint(kinds=both))} & {"InferencePool", "HTTPRoute"}
    unknown = endpoint(decode(routing=ASKED))
    assert not {r.kind for r in planned(unknown)} & {"InferencePool", "HTTPRoute"}
    state = router_state(settled(unknown))
    assert (state.ready, state.reason) == (False, "NoSuchKind")
    assert "install the CRDs" in state.message


NEITHER = {"epp": {"enabled": False}, "envoy": {"enabled": False}}
URL = "http://chat.default.svc:8080"


@pytest.mark.parametrize(
    ("observed", "ready", "reason", "url"),
    [
        pytest.param(settled(endpoint()), True, "RouterReady", URL, id="all there"),
        pytest.param(endpoint(), False, "Pending", URL, id="nothing there"),
        pytest.param(settled(endpoint(), epp=0), False, "EppUnavailable", URL, id="no picker"),
        pytest.param(settled(endpoint(), envoy=0), False, "EnvoyUnavailable", URL, id="no envoy"),
        pytest.param(
            settled(endpoint(), epp=0, envoy=0), False, "EnvoyUnavailable", URL, id="neither"
        ),
        pytest.param(endpoint(decode(routing=NEITHER)), True, "External", None, id="another's"),
        pytest.param(replace(endpoint(), pools=()), False, "Unread", None, id="no pool"),
        pytest.param(
            replace(settled(endpoint()), pools=()), False, "Unread", URL, id="no pool by now"
        ),
    ],
)
def test_router_state_names_what_is_missing(
    observed: ObservedEndpoint, ready: bool, reason: str, url: str | None
) -> None:
    state = router_state(observed)
    assert (state.ready, state.reason, state.url) == (ready, reason, url)


def test_router_state_says_why_streams_are_not_resumed() -> None:
    older = decode("a", routing={"epp": {"image": "own:1"}})
    assert "(routing.resume): a has an epp.image" in router_state(settled(endpoint(older))).message
    assert router_state(settled(endpoint())).message == "requests are routed"


def test_router_state_says_why_engines_are_not_told_priorities() -> None:
    flow = {"enabled": True, "propagatePriority": True}
    message = router_state(settled(endpoint(decode("a", routing={"flowControl": flow})))).message
    assert "flowControl.propagatePriority): a has " in message


def test_conflicting_pools_are_served_and_reported() -> None:
    observed = settled(endpoint(decode("a"), decode("b", routing={"split": "off"})))
    state = router_state(observed)
    assert (state.ready, state.reason) == (True, "SettingsDiffer")
    assert state.message.startswith('routing.split is "auto" in a, "off" in b')


def test_a_refused_write_is_reported_with_the_servers_message() -> None:
    failures = {ENVOY: Failure("QuotaExceeded", "no room for pods")}
    state = router_state(replace(settled(endpoint()), failures=failures))
    assert (state.ready, state.reason) == (False, "QuotaExceeded")
    assert state.message == "Deployment chat-envoy: no room for pods"


def test_the_largest_limit_of_bodies_holds_in_envoy_and_epp() -> None:
    pools = [
        decode(name, routing={"maxRequestBytes": n << 20}) for name, n in (("a", 64), ("b", 32))
    ]
    objects = planned(endpoint(*pools, decode("c")))
    assert f'"request_body_buffer_limit": {64 << 20}' in json.dumps(bootstrap(objects))
    assert f'"request_body_buffer_limit": {16 << 20}' in json.dumps(bootstrap(planned(endpoint())))
    deployment = objects[ObjectRef("apps/v1", "Deployment", "chat-epp")]
    (epp,) = deployment["spec"]["template"]["spec"]["containers"]
    at = epp["args"].index("--max-body")
    assert epp["args"][at + 1] == str(64 << 20)


def test_a_pool_states_the_service_of_clients() -> None:
    stated = {
        "type": "LoadBalancer",
        "annotations": {"cloud/internal": "true", labels.UNUSED_SINCE: "x"},
    }
    first = endpoint(decode("a", routing={"service": stated}), decode("b"))
    client = ObjectRef("v1", "Service", "chat")
    made = planned(first)[client]
    assert made["spec"]["type"] == "LoadBalancer"
    assert made["metadata"]["annotations"]["cloud/internal"] == "true"
    assert labels.UNUSED_SINCE not in made["metadata"]["annotations"]
    # Gateways and Envoy use the others inside the cluster.
    assert {
        ref.name for ref, body in planned(first).items() if body.get("spec", {}).get("type")
    } == {"chat"}
    # What a pool no longer states goes, and what the cloud has written stays.
    made["metadata"]["annotations"]["cloud/address"] = "1.2.3.4"
    without = replace(settled(first), pools=endpoint(decode("a"), decode("b")).pools)
    (again,) = plan_endpoint(without, SETTINGS).apply
    assert (again["metadata"]["name"], again["spec"]["type"]) == ("chat", "ClusterIP")
    assert set(again["metadata"]["annotations"]) == {labels.CONFIG_HASH}


def test_a_pool_states_metadata_of_the_routers_pods() -> None:
    stated = {"labels": {"inject": "true", labels.ENDPOINT: "x"}, "annotations": {"note": "1"}}
    first = endpoint(decode(routing={"podMetadata": stated}))
    for name in ("chat-epp", "chat-envoy"):
        body = planned(first)[ObjectRef("apps/v1", "Deployment", name)]
        metadata = body["spec"]["template"]["metadata"]
        assert metadata["labels"]["inject"] == "true"
        assert metadata["labels"][labels.ENDPOINT] == "chat", "the operator's own stay"
        assert metadata["annotations"]["note"] == "1"
        assert body["spec"]["selector"] == {
            "matchLabels": {k: v for k, v in metadata["labels"].items()
                            if k not in ("inject", labels.MANAGED_BY)}
        }  # fmt: skip
    without = replace(settled(first), pools=endpoint().pools)
    names = [body["metadata"]["name"] for body in plan_endpoint(without, SETTINGS).apply]
    assert names == ["chat-epp", "chat-envoy"]
