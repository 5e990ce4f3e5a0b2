"""Several pools behind one endpoint: combined requirements and reported conflicts."""

from typing import Any

import pytest

from tandem_operator.resources.pools import DecodePool
from tandem_operator.routing.endpoint.flow_control import priority_obstacles
from tandem_operator.routing.endpoint.observed import EndpointPool
from tandem_operator.routing.endpoint.requirements import (
    EndpointRequirements,
    combine_requirements,
    find_conflicts,
    resume_obstacles,
    with_pools_settings,
)
from tandem_operator.routing.endpoint.settings import RouterSettings

from .endpoints import decode, unified

CONFIG = {"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]}


def pools(*decode_pools: DecodePool) -> list[EndpointPool]:
    return [EndpointPool(f"uid-{pool.name}", pool) for pool in decode_pools]


def together(*decode_pools: DecodePool) -> EndpointRequirements:
    return combine_requirements(pools(*decode_pools))


def test_the_longest_drain_and_the_strictest_fallback_count() -> None:
    patient = decode("a", sidecar={"prefillTimeout": "90s"}, drain={"timeout": "10s"})
    strict = decode("b", sidecar={"kvTransferTimeout": "20s", "fallbackToUnified": False})
    requirements = together(patient, strict)
    # No timeout of one pool for the sidecars of the other, which have their own flags.
    assert requirements.disaggregated_serving == {
        "enabled": True,
        "fallback_to_unified": False,
    }
    assert requirements.drain_timeout == 120.0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((None, "zone"), "zone"),
        (("zone", "zone"), "zone"),
        (("zone", "rack"), None),
        ((None,), None),
    ],
)
def test_the_epp_reads_the_label_of_the_topology_that_the_pools_name(
    keys: tuple[str | None, ...], expected: str | None
) -> None:
    decodes = [
        decode(f"d-{i}", **({"placement": {"topologyKey": key}} if key else {}))
        for i, key in enumerate(keys)
    ]
    assert together(*decodes).disaggregated_serving.get("domain_label") == expected


def test_the_added_paths_of_all_pools_are_served() -> None:
    first = decode("a", routing={"apiPaths": ["/version", "/b"]})
    both = together(first, decode("c", routing={"apiPaths": ["/a", "/b"]}))
    assert both.api_paths == ("/a", "/b", "/version")
    assert both.disaggregated_serving["api_paths"] == ["/a", "/b", "/version"]
    assert "api_paths" not in together(decode()).disaggregated_serving


def test_nothing_is_split_without_a_pool_that_splits() -> None:
    without_split = decode("a", routing={"split": "off"})
    assert together(without_split, unified()).disaggregated_serving["enabled"] is False
    assert together(without_split, decode("b")).disaggregated_serving["enabled"] is True


@pytest.mark.parametrize(
    ("modes", "enabled", "split"),
    [
        (["always"], True, "always"),
        (["always", "always"], True, "always"),
        (["always", "auto"], True, None),
        (["always", "off"], True, None),
        (["auto"], True, None),
        (["off", "off"], False, None),
    ],
)
def test_all_is_split_if_all_pools_that_split_say_so(
    modes: list[str], enabled: bool, split: str | None
) -> None:
    decodes = [decode(f"d-{i}", routing={"split": mode}) for i, mode in enumerate(modes)]
    serving = together(*decodes, unified()).disaggregated_serving
    assert (serving["enabled"], serving.get("split")) == (enabled, split)


def test_the_smallest_limit_of_prefills_on_decode_pods_counts() -> None:
    limits = [decode(f"d-{n}", routing={"maxPrefillOnDecode": n}) for n in (512, 64)]
    assert together(*limits, decode("e")).disaggregated_serving["max_prefill_on_decode"] == 64
    assert "max_prefill_on_decode" not in together(decode()).disaggregated_serving
    (line,) = find_conflicts(pools(*limits))
    assert line.startswith("routing.maxPrefillOnDecode is 512 in d-512, 64 in d-64: 64 is used;")


def test_a_component_is_required_when_any_pool_enables_it() -> None:
    neither = {"epp": {"enabled": False}, "envoy": {"enabled": False}}
    alone = together(decode("a", routing=neither))
    assert (alone.epp, alone.has_front, alone.inference_pool) == (False, False, False)
    both = together(decode("a", routing=neither), decode("b"))
    assert (both.epp, both.has_front) == (True, True)


def test_the_most_replicas_and_the_first_configuration_by_name_count() -> None:
    requirements = together(
        decode("b", routing={"epp": {"replicas": 2, "config": CONFIG}}),
        decode("a", routing={"epp": {"replicas": 3}}),
        decode("c", routing={"epp": {"config": {"plugins": []}}}),
    )
    assert (requirements.epp_replicas, requirements.epp_config) == (3, CONFIG)


@pytest.mark.parametrize(
    ("config", "separates"),
    [
        ({"cache_salt": {"from_header": "x-tandem-client"}}, True),
        ({"cache_salt": {"from_header": None}}, False),
        ({"cache_salt": None}, False),
        (CONFIG, False),
    ],
)
def test_tenants_that_are_kept_apart_need_the_epp(
    config: dict[str, object], separates: bool
) -> None:
    requirements = together(decode("a", routing={"epp": {"config": config}}))
    assert requirements.separates_tenants is separates


def test_the_first_health_checks_by_name_count() -> None:
    checks = {"path": "/health", "interval": "5s", "timeout": "500ms", "healthyThreshold": 2}
    stated = decode("b", routing={"epp": {"healthChecks": checks}})
    other = decode("c", routing={"epp": {"healthChecks": {"path": "/ping"}}})
    assert together(decode("a"), stated, other).health_checks == {
        "path": "/health",
        "interval": "5s",
        "timeout": "500ms",
        "healthy_threshold": 2,
    }
    assert together(decode("a")).health_checks == {}
    assert find_conflicts(pools(decode("a"), stated)) == ()
    (line,) = find_conflicts(pools(decode("a"), stated, other))
    assert line.startswith("routing.epp.healthChecks of c differs from that of b, which is used")


def test_the_first_settings_of_resumed_streams_by_name_count() -> None:
    stated = decode("b", routing={"resume": {"enabled": "always", "maxRegeneration": "1.5s"}})
    other = decode("c", routing={"resume": {"enabled": "never"}})
    asked = {"enabled": True, "max_regeneration": "1500ms", "max_moves": 2}
    assert together(decode("a"), stated, other).resume == asked
    assert together(decode("a"), other).resume == {}
    assert together(decode("a")).resume == asked | {"max_regeneration": "10s"}
    assert find_conflicts(pools(decode("a"), stated)) == ()
    (line,) = find_conflicts(pools(decode("a"), stated, other))
    assert line.startswith("routing.resume of c differs from that of b, which is used")


def test_the_first_settings_of_flow_control_by_name_count() -> None:
    bands = [{"priority": 1, "ttl": "5s"}, {"priority": -1, "maxRequests": 9}]
    stated = decode("b", routing={"flowControl": {"enabled": True, "bands": bands}})
    other = decode("c", routing={"flowControl": {"enabled": False}})
    asked = together(decode("a"), stated, other).flow_control
    assert asked["enabled"]
    assert asked["ttl"] == "1m"
    assert asked["bands"] == [{"priority": 1, "ttl": "5s"}, {"priority": -1, "max_requests": 9}]
    assert together(decode("a")).flow_control == together(decode("a"), other).flow_control == {}
    (line,) = find_conflicts(pools(decode("a"), stated, other))
    assert line.startswith("routing.flowControl of c differs from that of b, which is used")
    config = {"flow_control": {"enabled": True}}
    by_config = {"epp": {"config": config}}
    assert together(decode("a", routing=by_config)).epp_config == config
    off = {**by_config, "flowControl": {"enabled": False}}
    assert together(decode("a", routing=off)).epp_config == {}
    gates = {"epp": {"config": {"featureGates": ["dataLayer", "flowControl"]}}}
    off = {**gates, "flowControl": {"enabled": False}}
    assert together(decode("a", routing=off)).epp_config == {
        "featureGates": ["dataLayer", "flowControl", "flowControl=false"]
    }


def test_models_that_have_no_pod_are_told_where_their_requests_wait() -> None:
    def told(**flow: Any) -> Any:
        routing = {"flowControl": {"enabled": True, **flow}}
        return together(decode("a", routing=routing)).flow_control.get("models")

    assert told() is None
    assert told(noEndpointTTL="5m") == list(decode("a").spec.model.names)


def test_the_settings_of_clients_reach_the_epp() -> None:
    clients = [{"name": "web", "priority": 5}, {"name": "ci", "tenant": "builds"}]
    pool = decode("a", routing={"flowControl": {"enabled": True, "clients": clients}})
    assert together(pool).flow_control["clients"] == [
        {"name": "web", "priority": 5},
        {"name": "ci", "priority": 0, "tenant": "builds"},
    ]


def test_priorities_reach_only_engines_that_take_them() -> None:
    routing = {"flowControl": {"enabled": True, "propagatePriority": True}}

    def told(*args: str, **engine: str) -> bool:
        pool = decode("a", engine={**engine, "extraArgs": list(args)}, routing=routing)
        return together(pool).flow_control.get("propagate_priority", False)

    assert told("--scheduling-policy", "priority")
    assert told("--scheduling-policy=priority")
    assert told("--scheduling_policy", "fcfs", "--scheduling_policy", "priority")
    assert not told("--scheduling-policy", "priority", "--scheduling-policy", "fcfs")
    assert not told("--scheduling-policy", "fcfs")
    assert not told()
    with_engines = decode("a", engine={"extraArgs": ["--scheduling-policy=priority"]})
    assert priority_obstacles([with_engines, decode("b", routing=routing)]) == (
        "b has no --scheduling-policy priority in engine.extraArgs",
    )
    assert priority_obstacles([with_engines]) == ()


def test_each_model_has_the_objectives_of_its_first_pool_by_name() -> None:
    def of(name: str, model: str, **slo: Any) -> DecodePool:
        routing = {"slo": slo} if slo else {}
        return unified(name, model={"name": model, "servedNames": [model]}, routing=routing)

    first, silent = of("b", "m", ttft="1.5s"), of("a", "m")
    second, other = of("c", "m", ttft="2s", itl="50ms"), of("d", "n", itl="20ms", attainment=1)
    objectives = {"ttft": "1500ms", "attainment": 0.9}
    assert together(silent, first).slo == {"m": objectives}
    assert together(silent, first, second, other).slo == {
        "m": objectives,
        "n": {"itl": "20ms", "attainment": 1.0},
    }
    assert together(silent).slo == {}
    assert find_conflicts(pools(silent, first, other)) == ()
    (line,) = find_conflicts(pools(silent, first, second, other))
    assert line.startswith("routing.slo of c differs from that of b, which is used")


@pytest.mark.parametrize(
    ("engine", "routing", "obstacle"),
    [
        ({"type": "torch"}, {}, None),
        ({"type": "vllm", "version": "0.32.1"}, {}, None),
        ({"type": "vllm", "version": "0.31.0"}, {}, "runs vLLM 0.31.0, not vLLM 0.32 or later"),
        ({"type": "torch"}, {"epp": {"image": "own:1"}}, "has an epp.image of its own"),
        ({"type": "torch"}, {"epp": {"enabled": False}}, "has routing.epp disabled"),
    ],
    ids=["torch", "vllm", "older vllm", "image of one's own", "another picker"],
)
def test_auto_resumes_streams_where_that_is_known_to_be_exact(
    engine: dict[str, Any], routing: dict[str, Any], obstacle: str | None
) -> None:
    local = {"source": {"path": "/model"}}
    known = unified("a", engine={"type": "torch"}, model=local)
    auto = unified("b", engine=engine, model=local, routing={**routing, "resume": {}})
    assert bool(together(known, auto).resume) is (obstacle is None), (
        "as all of the endpoint's pools"
    )
    assert [line.startswith(f"b {obstacle}") for line in resume_obstacles([known, auto])] == (
        [] if obstacle is None else [True]
    )
    always = decode("c", routing={"resume": {"enabled": "always"}})
    assert together(always).resume["enabled"] is True
    assert resume_obstacles([always]) == ()


def test_streams_are_resumed_by_default() -> None:
    asked = {"enabled": True, "max_regeneration": "10s", "max_moves": 2}
    assert together(decode()).resume == asked
    assert together(decode(routing={"resume": {"enabled": "never"}})).resume == {}
    assert together(unified(engine={"version": "0.31.0"})).resume == {}


def test_each_gateway_is_listed_once() -> None:
    def via(pool: str, **gateway: Any) -> DecodePool:
        routing = {"inferencePool": {"enabled": True}, "gatewayRef": gateway}
        return decode(pool, routing=routing)

    requirements = together(
        via("a", name="y"), via("b", name="x", namespace="n"), via("c", name="y")
    )
    assert [(g.name, g.namespace) for g in requirements.gateways] == [("y", None), ("x", "n")]


def test_a_route_is_limited_by_all_its_pools_or_not_at_all() -> None:
    def via(pool: str, **limits: Any) -> DecodePool:
        routing = {"inferencePool": {"enabled": True}, "gatewayRef": {"name": "g", **limits}}
        return decode(pool, routing=routing)

    path, header = {"path": {"value": "/v1"}}, {"headers": [{"name": "h", "value": "v"}]}
    first = via("a", hostnames=["x", "y"], matches=[path])
    requirements = together(first, via("b", hostnames=["y", "z"], matches=[header, path]))
    assert requirements.hostnames == ("x", "y", "z")
    assert [bool(match.headers) for match in requirements.matches] == [False, True]
    requirements = together(first, via("b", matches=[path]))
    assert requirements.hostnames == ()
    assert len(requirements.matches) == 1
    assert together(first, via("b", hostnames=["z"])).matches == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"epp": {"replicas": 1}}, {"epp": {"replicas": 2}}),
        ({"epp": {"config": CONFIG}}, {}),
        ({"inferencePool": {"enabled": True}}, {}),
    ],
)
def test_compatible_settings_are_no_conflict(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert find_conflicts(pools(decode("a", routing=first), decode("b", routing=second))) == ()


def test_a_conflict_names_pools_values_and_the_value_used() -> None:
    lines = find_conflicts(
        pools(
            decode("b", routing={"epp": {"enabled": False}}),
            decode("a", routing={"split": "off"}),
            unified("u"),
        )
    )
    assert lines == (
        "routing.epp.enabled is true in a, false in b, true in u: true is used;"
        " set the same value in all pools of the endpoint",
        'routing.split is "off" in a, "auto" in b: "auto" is used;'
        " set the same value in all pools of the endpoint",
    )


def test_always_beside_off_is_auto() -> None:
    routings = {"a": {"split": "always"}, "b": {"split": "off"}}
    (line,) = find_conflicts(pools(*(decode(n, routing=r) for n, r in routings.items())))
    assert line.startswith('routing.split is "always" in a, "off" in b: "auto" is used;')


def test_conflicting_configurations_are_named_but_not_printed() -> None:
    (line,) = find_conflicts(
        pools(
            decode("a", routing={"epp": {"config": CONFIG}}),
            decode("b", routing={"epp": {"config": {"plugins": []}}}),
        )
    )
    assert line == (
        "routing.epp.config of b differs from that of a, which is used:"
        " set it in one pool, or the same in all"
    )


def test_of_several_pools_the_first_that_says_where_routers_run_counts() -> None:
    silent = decode("a")
    first = decode("b", routing={"nodeSelector": {"pool": "b"}, "epp": {"image": "tandem:1"}})
    second = decode("c", routing={"nodeSelector": {"pool": "c"}, "epp": {"image": "tandem:1"}})
    settings = with_pools_settings(RouterSettings(), pools(second, silent, first))
    assert settings.node_selector == {"pool": "b"}
    assert settings.tandem_image == "tandem:1"
    (line,) = find_conflicts(pools(silent, first, second))
    assert line.startswith("routing.nodeSelector of c differs from that of b, which is used")


def test_long_lists_are_not_quoted_in_a_conflict() -> None:
    first = decode("a", routing={"epp": {"env": [{"name": "A", "value": "secret"}]}})
    second = decode("b", routing={"epp": {"env": [{"name": "A", "value": "other"}]}})
    (line,) = find_conflicts(pools(first, second))
    assert line.startswith("routing.epp.env of b differs from that of a")
    assert "secret" not in line


def test_resumed_streams_that_are_turned_off_are_off_in_the_epps_own_configuration() -> None:
    config = {"kind": "EndpointPickerConfig", "resume": {"enabled": True}}
    own = decode("a", routing={"epp": {"config": config}})
    off = decode("b", routing={"resume": {"enabled": "never"}})
    assert together(own, off).epp_config == {"kind": "EndpointPickerConfig"}
    assert together(own).epp_config == config
