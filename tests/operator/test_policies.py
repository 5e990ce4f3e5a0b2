"""NetworkPolicies of an endpoint: which of the rendered pods may reach which."""

from typing import Any

import pytest

from tandem_contract import labels, ports
from tandem_operator.pods.manifests import endpoint_labels, pods
from tandem_operator.resources.pool_files import parse_pools
from tandem_operator.routing.endpoint.observed import EndpointPool, ObjectRef, ObservedEndpoint
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import NetworkPolicySettings, RouterSettings

from .endpoints import KEY, NOW, SECRET, with_children
from .endpoints import endpoint as lone_endpoint
from .pool_yaml import decode_pool, documents, prefill_pool
from .reachability import Source, may_connect

POLICY = NetworkPolicySettings(
    operator_namespace="tandem-system",
    operator_labels={"app.kubernetes.io/component": "operator"},
    prometheus_namespaces=("monitoring",),
    gateway_namespaces=("gateways",),
    control_plane_cidrs=("10.1.0.0/28",),
)
RANKS = {"accelerator": {"count": 2}, "parallelism": {"tensor": 1, "data": 2}}
PORTS = {
    "sidecar": ports.SIDECAR,
    "admin": ports.SIDECAR_ADMIN,
    "decode engine": ports.ENGINE_DECODE,
    "prefill engine": ports.ENGINE_PREFILL,
    "side channel": ports.SIDE_CHANNEL,
    "side channel of a rank": ports.SIDE_CHANNEL + 1,
    "UCX": 20_000,
    "last of UCX": 20_999,
    "beside UCX": 21_000,
    "ephemeral": 45_678,
    "ephemeral with a wider range of the node": 1_500,
    "bootstrap": ports.MOONCAKE_BOOTSTRAP,
    "KV events": ports.KV_EVENTS,
    "KV events of a rank": ports.KV_EVENTS + 1,
    "replay": ports.KV_EVENTS_REPLAY,
    "grpc": ports.EPP_GRPC,
    "peers": ports.EPP_PEERS,
    "epp metrics": ports.EPP_METRICS,
    "http": ports.ENVOY,
    "statistics": ports.ENVOY_HEALTH,
}


class Endpoint:
    """Endpoint chat with two sets, (p, d) with the unified pools v and w, and (q, e), and a lone
    pool u: its pods and policies."""

    def __init__(
        self,
        settings: NetworkPolicySettings | None = POLICY,
        transfer: dict[str, Any] | None = None,
        **routing: Any,
    ) -> None:
        """`transfer`: of the first set."""
        first = prefill_pool(transfer=transfer) if transfer else prefill_pool()
        routing = {"endpoint": KEY.name, **routing}
        second = prefill_pool(**RANKS)
        second["metadata"]["name"] = "q"
        paired = decode_pool(**RANKS, prefillRef={"name": "q"}, routing=routing)
        paired["metadata"]["name"] = "e"
        lone = decode_pool(role="unified", model={"name": "org/model"}, routing=routing)
        del lone["spec"]["prefillRef"]
        lone["metadata"]["name"] = "u"
        unified = [decode_pool(role="unified", routing=routing) for _ in "vw"]
        for name, pool in zip("vw", unified, strict=True):
            pool["metadata"]["name"] = name
        sets = parse_pools(
            documents(first, decode_pool(routing=routing), *unified, second, paired, lone)
        )
        decodes = [decode for pool_set in sets for decode in pool_set.decodes]
        named = tuple(EndpointPool(f"uid-{decode.name}", decode) for decode in decodes)
        observed = ObservedEndpoint(KEY, NOW, named, secret=SECRET)
        self.objects = plan_endpoint(observed, RouterSettings(network_policy=settings)).apply
        self.policies = [body for body in self.objects if body["kind"] == "NetworkPolicy"]
        self.sources = {
            "client": Source(KEY.namespace, {"app": "client"}),
            "client of another namespace": Source("other", {"app": "client"}),
            "outside": Source(),
            "operator": Source("tandem-system", {"app.kubernetes.io/component": "operator"}),
            "pod beside the operator": Source("tandem-system", {"app": "x"}),
            "false operator": Source("other", {"app.kubernetes.io/component": "operator"}),
            "prometheus": Source("monitoring", {"app": "prometheus"}),
            "gateway": Source("gateways", {"app": "gateway"}),
            "API server": Source(address="10.1.0.3"),
            **{pool: self._pod(sets, pool) for pool in "pdqeuvw"},
            **{name: self._router(name) for name in ("envoy", "epp")},
            "another endpoint's envoy": Source(
                KEY.namespace, {"app.kubernetes.io/component": "envoy", "tandem.dev/endpoint": "x"}
            ),
        }

    def may_connect(self, source: str, target: str, port: str) -> bool:
        return may_connect(self.policies, self.sources[source], self.sources[target], PORTS[port])

    def _pod(self, sets: Any, name: str) -> Source:
        (pool_set, pool) = next((s, p) for s in sets for p in s.pools if p.name == name)
        pod_labels = next(
            pod["metadata"]["labels"]
            for pod in pods(pool_set)
            if pod["metadata"]["labels"]["tandem.dev/pool"] == name
        )
        return Source(KEY.namespace, {**pod_labels, **endpoint_labels(pool, pool_set)})

    def _router(self, component: str) -> Source:
        for body in self.objects:
            if (body["kind"], body["metadata"]["name"]) == ("Deployment", f"chat-{component}"):
                return Source(KEY.namespace, body["spec"]["template"]["metadata"]["labels"])
        return Source("nowhere")


HANDOFF = ("side channel", "UCX", "last of UCX")
ANYWHERE = ("ephemeral", "ephemeral with a wider range of the node", "bootstrap")
MUST = [
    # A hand-off: the sidecar asks the prefill engine, and both engines connect to each other.
    *(("d", "p", port) for port in ("prefill engine", *HANDOFF)),
    *(("p", "d", port) for port in HANDOFF),
    *(("e", "q", port) for port in ("prefill engine", "side channel of a rank", *HANDOFF)),
    *(("q", "e", port) for port in ("side channel of a rank", *HANDOFF)),
    # Unified pods prefill for decode pods and for each other, through their sidecars.
    *((source, "v", port) for source in ("d", "w") for port in ("sidecar", *HANDOFF)),
    *(("v", target, port) for target in ("p", "d") for port in HANDOFF),
    # A stream goes on at another pod, through its sidecar, and reads the KV of one that drains.
    *(("d", "d", port) for port in ("sidecar", *HANDOFF)),
    *((source, target, "sidecar") for source, target in (("v", "d"), ("u", "u"), ("e", "d"))),
    *(("p", "v", port) for port in HANDOFF),
    # Requests.
    *(("envoy", pool, "sidecar") for pool in ("d", "e", "u")),
    *(("gateway", pool, "sidecar") for pool in ("d", "u")),
    ("envoy", "epp", "grpc"),
    ("gateway", "epp", "grpc"),
    *((source, "envoy", "http") for source in ("client", "outside", "gateway")),
    ("client of another namespace", "envoy", "http"),
    # What the EPP reads.
    *(("epp", pool, "sidecar") for pool in ("d", "e", "u")),
    *(("epp", pool, "prefill engine") for pool in ("p", "q")),
    *(("epp", pool, port) for pool in ("d", "p", "u") for port in ("KV events", "replay")),
    *(("epp", pool, "KV events of a rank") for pool in ("q", "e")),
    ("epp", "epp", "peers"),
    # Monitors.
    *(
        (source, target, port)
        for source in ("operator", "prometheus", "API server")
        for target, port in (
            ("d", "admin"),
            ("u", "admin"),
            ("d", "decode engine"),
            ("p", "prefill engine"),
            ("epp", "epp metrics"),
            ("envoy", "statistics"),
        )
    ),
]
STRANGERS = (
    *("client", "client of another namespace", "outside", "pod beside the operator"),
    *("false operator", "another endpoint's envoy"),
)
MUST_NOT = [
    *(
        (source, target, port)
        for source in STRANGERS
        for target, port in (
            *(("d", port) for port in ("sidecar", "admin", "decode engine", "KV events", "UCX")),
            *(("p", port) for port in ("prefill engine", "side channel", "KV events", "UCX")),
            *(("epp", port) for port in ("grpc", "peers", "epp metrics")),
            ("envoy", "statistics"),
        )
    ),
    # One request to a decode engine past its sidecar can kill it; the admin port can drain it.
    *(
        (source, "d", port)
        for source in ("p", "q", "e", "u", "v", "envoy", "epp", "gateway")
        for port in ("decode engine", "admin")
    ),
    *((source, "v", port) for source in "dw" for port in ("decode engine", "admin")),
    *(("p", target, "sidecar") for target in "dv"),
    *((source, "v", port) for source in "qeu" for port in HANDOFF),
    ("q", "v", "sidecar"),
    # What no engine listens on.
    *(
        (source, target, port)
        for source, target in (("d", "p"), ("p", "d"), ("d", "v"), ("w", "v"), ("e", "q"))
        for port in ("beside UCX", *ANYWHERE)
    ),
    # Another set, behind the same endpoint.
    *((source, "p", port) for source in ("e", "u") for port in ("prefill engine", *HANDOFF)),
    *((source, "d", port) for source in ("q", "e", "u") for port in HANDOFF),
    *(("p", "e", port) for port in HANDOFF),
    *(("p", "u", port) for port in HANDOFF),
    # Those who may do something may not do all.
    ("gateway", "p", "prefill engine"),
    ("gateway", "d", "KV events"),
    ("envoy", "p", "prefill engine"),
    ("epp", "p", "bootstrap"),
    ("prometheus", "d", "sidecar"),
    ("prometheus", "p", "side channel"),
    ("prometheus", "epp", "grpc"),
    ("operator", "d", "side channel"),
    ("d", "epp", "grpc"),
]


@pytest.fixture(scope="module")
def endpoint() -> Endpoint:
    return Endpoint()


@pytest.mark.parametrize(("source", "target", "port"), MUST)
def test_may(endpoint: Endpoint, source: str, target: str, port: str) -> None:
    assert endpoint.may_connect(source, target, port)


@pytest.mark.parametrize(("source", "target", "port"), MUST_NOT)
def test_may_not(endpoint: Endpoint, source: str, target: str, port: str) -> None:
    assert not endpoint.may_connect(source, target, port)


def test_every_port_of_a_pod_is_open_to_its_set_or_picker(endpoint: Endpoint) -> None:
    """A port that the renderer adds, and that no policy knows, would break hand-offs silently."""
    (pool_set,) = parse_pools(documents(prefill_pool(**RANKS), decode_pool(**RANKS)))
    for pod in pods(pool_set):
        role = pod["metadata"]["labels"]["tandem.dev/role"]
        peer, target = ("e", "q") if role == "prefill" else ("q", "e")
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        for port in (port for container in containers for port in container["ports"]):
            number = port["containerPort"]
            assert any(
                may_connect(
                    endpoint.policies, endpoint.sources[name], endpoint.sources[target], number
                )
                for name in (peer, "epp", "operator")
            ), port


def test_pods_of_a_deleted_pool_finish_their_hand_offs(endpoint: Endpoint) -> None:
    deleted = Source(KEY.namespace, {**endpoint.sources["d"].labels, "tandem.dev/pool": "gone"})
    for port in ("prefill engine", *HANDOFF):
        assert may_connect(endpoint.policies, deleted, endpoint.sources["p"], PORTS[port])


def test_pods_without_known_ports_take_connections_at_all_of_their_set() -> None:
    """Those that an earlier operator made, and those of a revision with other ports."""
    endpoint = Endpoint()
    for label in ({}, {labels.HANDOFF_PORTS: "5600_30000-30999"}):
        for source, target, more in (
            ("d", "p", ("prefill engine",)), ("p", "d", ()), ("d", "v", ("sidecar",)),
        ):  # fmt: skip
            pod = endpoint.sources[target]
            others = {k: v for k, v in pod.labels.items() if k != labels.HANDOFF_PORTS}
            old = Source(KEY.namespace, {**others, **label})
            for port in (*HANDOFF, *ANYWHERE, *more):
                assert may_connect(endpoint.policies, endpoint.sources[source], old, PORTS[port])
            for server in ("admin", "decode engine") if target != "p" else ():
                assert not may_connect(
                    endpoint.policies, endpoint.sources[source], old, PORTS[server]
                )
            assert not may_connect(endpoint.policies, endpoint.sources["q"], old, PORTS["UCX"])


def test_where_kv_moves_through_a_store_engines_may_not_connect_to_each_other() -> None:
    transfer = {"connector": "storage", "storage": {"endpoint": "http://store:8080"}}
    endpoint = Endpoint(transfer=transfer)
    assert endpoint.may_connect("d", "p", "prefill engine")
    for source, target in (("d", "p"), ("p", "d"), ("v", "p"), ("p", "v"), ("d", "d")):
        for port in (*HANDOFF, *ANYWHERE):
            assert not endpoint.may_connect(source, target, port), (source, target, port)
    assert endpoint.may_connect("e", "q", "side channel")


def test_a_pool_with_another_picker_is_open_to_its_namespace() -> None:
    endpoint = Endpoint(epp={"enabled": False})
    for target, port in (("d", "sidecar"), ("p", "prefill engine"), ("p", "KV events")):
        assert endpoint.may_connect("client", target, port)
        assert endpoint.may_connect("gateway", target, port)
        assert not endpoint.may_connect("client of another namespace", target, port)
    assert not endpoint.may_connect("client", "d", "decode engine")


@pytest.mark.parametrize(
    "routing", [{"envoy": {"enabled": False}}, {"inferencePool": {"enabled": True}}]
)
def test_a_gateway_in_an_unknown_namespace_reaches_sidecars_and_nothing_else(
    routing: dict[str, Any],
) -> None:
    known = NetworkPolicySettings(POLICY.operator_namespace, POLICY.operator_labels)
    endpoint = Endpoint(known, **routing)
    assert endpoint.may_connect("client of another namespace", "d", "sidecar")
    assert endpoint.may_connect("client of another namespace", "epp", "grpc")
    for target, port in (("d", "admin"), ("d", "decode engine"), ("p", "prefill engine")):
        assert not endpoint.may_connect("client of another namespace", target, port)


def test_without_settings_there_are_no_policies() -> None:
    assert Endpoint(None).policies == []


def test_policies_that_are_switched_off_are_deleted() -> None:
    objects = plan_endpoint(lone_endpoint(), RouterSettings(network_policy=POLICY)).apply
    plan = plan_endpoint(with_children(lone_endpoint(), objects), RouterSettings())
    policies = {ObjectRef.of(body) for body in objects if body["kind"] == "NetworkPolicy"}
    assert policies
    assert set(plan.delete) == policies


def test_names_of_different_endpoints_differ(endpoint: Endpoint) -> None:
    names = [policy["metadata"]["name"] for policy in endpoint.policies]
    assert len(names) == len(set(names))
    assert {name for name in names if "." in name} == {
        f"chat.{pods}{ports}"
        for pods in ("p-prefill", "p-decode", "q-prefill", "q-decode")
        for ports in ("", ".5600.20000-20999")
    }
