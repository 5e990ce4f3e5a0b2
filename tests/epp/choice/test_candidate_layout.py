"""Which pods a request may go to, and what an adapter adds to their costs."""

import json
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role, RoutingPath
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pairing import can_hand_off, known_fabric
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.candidate_layout import (
    MAX_NARROWED,
    CandidateLayout,
    RecentlyUsed,
    make_layout,
)
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement
from tandem_planner.fabrics import fabric_class
from tests.epp.placement.test_picker import LONG, NOW, PickerSetup, backend

PODS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "unified"]),
        st.sampled_from("12"),
        st.booleans(),
        st.sampled_from([(None, None), ("n", "r"), ("m", "r"), ("o", None)]),
    ),
    min_size=1,
    max_size=8,
)
"""Role, compat hash, whether the gateway allows the pod, and its node and domain."""
Described = tuple[str, str, bool, tuple[str | None, str | None]]


def fleet_of(pods: list[Described]) -> Fleet:
    setup = PickerSetup()
    setup.fleet.apply(
        at(backend(f"pod-{i}", role, hash_), *place)
        for i, (role, hash_, _, place) in enumerate(pods)
    )
    return setup.fleet


def at(
    discovered: DiscoveredBackend, node: str | None, domain: str | None = None
) -> DiscoveredBackend:
    return DiscoveredBackend(msgspec.structs.replace(discovered.backend, node=node, domain=domain))


def comparable(layout: CandidateLayout) -> dict[str, object]:
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    values["groups"] = {
        (group.prefills, group.decodes, group.fabric, (*group.pair_classes(),))
        for group in layout.groups
    }
    return values


@given(pods=PODS)
def test_a_layout_within_a_subset_is_that_of_the_subset(pods: list[Described]) -> None:
    fleet = fleet_of(pods)
    ready = tuple(fleet)
    some = tuple(pod for pod, (_, _, allowed, _) in zip(fleet, pods, strict=True) if allowed)
    within = make_layout(fleet, ready, None).within(
        frozenset(fleet.figures.rows[pod] for pod in some)
    )
    assert comparable(within) == comparable(make_layout(fleet, some, None))


@given(pods=PODS)
def test_a_layout_knows_the_class_of_every_pair(pods: list[Described]) -> None:
    fleet = fleet_of(pods)
    layout = make_layout(fleet, tuple(fleet), None)
    expected = {}
    for row, decode in enumerate(fleet):
        partners = [pod for pod in fleet if fleet.can_exchange(pod, decode)]
        has_role = any(can_hand_off(pod, decode) for pod in fleet)
        serves_decode = decode.backend.role.serves(Role.DECODE)
        assert layout.has_prefill_pod(row) is (has_role and serves_decode)
        if partners and decode.backend.role.serves(Role.DECODE):
            classes = {fabric_class(pod.place, decode.place) for pod in partners}
            expected[row] = tuple(sorted(classes))
    is_any_near = {*expected.values()} - {(FabricClass.ELSEWHERE,)}
    assert layout.fabrics == (expected if is_any_near else {})


def fabric_setup(**rates: float) -> PickerSetup:
    """Two nodes in one rack and one elsewhere, each with a pod of both roles. `rates`: bytes per
    second of transfers per class."""
    places = {"1": ("n1", "r"), "2": ("n2", "r"), "3": ("n3", None)}
    setup = PickerSetup()
    setup.fleet.apply(
        at(backend(f"{role[0]}{number}", role), *place)
        for number, place in places.items()
        for role in ("prefill", "decode")
    )
    for pod in setup.fleet:
        for name, rate in rates.items():
            pod.estimates.add_transfers((1.0, 1e9, 1e9 / rate), NOW, FabricClass[name])
        pod.estimates.learned()
    return setup


def unified_setup(role: str = "prefill", compat: str | None = None) -> PickerSetup:
    """Two unified pods, of which `u` has computed VERY_LONG and decodes for many requests, and a
    pod `p` that has failed."""
    setup = PickerSetup()
    setup.fleet.apply(
        [backend("u", "unified"), backend("v", "unified", compat), backend("p", role)]
    )
    setup.down("p")
    only = frozenset({setup["u"].address or ""})
    request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"}, only)
    body = json.dumps({"model": "m", "prompt": VERY_LONG}).encode()
    placement = setup.picker.place(request, body, NOW)
    placement.on_response_headers(ResponseHeaders(None), NOW)
    placement.end(NOW)
    setup["u"].estimates.decodes = 300
    setup["u"].estimates.changed()
    return setup


def test_a_unified_pod_prefills_for_another_where_that_is_cheaper() -> None:
    setup = unified_setup()
    _, plan = setup.place(VERY_LONG)
    assert (plan.path, plan.decode.name) == (RoutingPath.PREFILL_THEN_DECODE, "v")
    assert [(target.name, target.asks_for_proof) for target in plan.prefill] == [("u", True)]


def test_unified_pods_share_nothing_where_that_is_not_cheaper() -> None:
    """A prompt that none has computed; then one whose KV is on an idle pod."""
    setup = unified_setup()
    _, plan = setup.place("other " * 20_000)
    assert (plan.path, plan.reason) == (RoutingPath.FALLBACK, "no_prefill_backend")
    setup["u"].estimates.decodes = 0
    setup["u"].estimates.changed()
    _, plan = setup.place(VERY_LONG)
    assert (plan.path, plan.decode.name) == (RoutingPath.FAST_DECODE, "u")


@pytest.mark.parametrize(("role", "compat"), [("unified", None), ("prefill", "another")])
def test_unified_pods_share_nothing_without_a_connector(role: str, compat: str | None) -> None:
    """Without a prefill pod beside them they have none; of another hash they cannot use it."""
    _, plan = unified_setup(role, compat).place(VERY_LONG)
    assert plan.prefill == ()


RATES = {"SAME_NODE": 5e10, "SAME_DOMAIN": 1e10, "ELSEWHERE": 3e9}
VERY_LONG = "word " * 20_000


def test_requests_stay_on_a_node_while_its_prefill_pod_is_free() -> None:
    setup = fabric_setup(**RATES)
    plans = [setup.place_alone(f"{i} {VERY_LONG}") for i in range(12)]
    pairs = {(plan.prefill[0].name, plan.decode.name) for plan in plans}
    assert pairs == {("p1", "d1"), ("p2", "d2"), ("p3", "d3")}
    assert all(len(plan.prefill) == 3 for plan in plans), "retries are on other nodes"


def test_a_queue_sends_the_prefill_to_another_node_of_the_domain() -> None:
    setup = fabric_setup(**RATES)
    setup["p1"].estimates.queue.add(60.0, NOW, has_first_token=True)
    setup["p1"].estimates.changed()
    for name in ("d2", "d3", "p3"):
        setup.down(name)
    _, plan = setup.place(VERY_LONG)
    assert (plan.prefill[0].name, plan.decode.name) == ("p2", "d1")


def test_the_explanation_names_the_class_of_the_chosen_pair() -> None:
    setup = fabric_setup(**RATES)
    placement, _ = setup.place(VERY_LONG)
    [trace] = setup.history.find("r")
    decodes = [cost for cost in trace.costs if cost.part == "decode"]
    near = ["elsewhere", "same_domain", "same_node"]
    classes = {
        name: sorted(cost.fabric for cost in decodes if cost.pod == name)
        for name in ("d1", "d2", "d3")
    }
    assert classes == {"d1": near, "d2": near, "d3": ["elsewhere", "same_node"]}
    [chosen] = [cost for cost in decodes if cost.chosen]
    assert (chosen.pod, chosen.fabric) == (placement.decode.name, "same_node")
    of_pod = {cost.fabric: cost.terms["transfer"] for cost in decodes if cost.pod == chosen.pod}
    assert of_pod["same_node"] < of_pod["elsewhere"]
    first_token = ("wait", "prefill", "transfer", "handoff", "join")
    both = [cost for cost in trace.costs if cost.chosen]
    seconds = [cost.terms.get(name, 0.0) for cost in both for name in first_token]
    assert trace.predicted_ttft == pytest.approx(sum(seconds))


def test_a_placed_request_teaches_the_class_of_its_pair() -> None:
    setup = fabric_setup()
    placement, plan = setup.place(VERY_LONG)
    fabric = known_fabric(setup[plan.prefill[0].name], placement.decode)
    response = ResponseHeaders("transfer=0.1;bytes=1000", prefill=plan.prefill[0].name)
    placement.on_response_headers(response, NOW + 1.0)
    assert fabric is not None
    counts = [placement.decode.estimates.fabrics.fit(fabric).count for fabric in FabricClass]
    assert counts == [int(each is fabric) for each in FabricClass]


def test_where_nothing_is_known_of_places_no_class_is_named_or_learned() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place(VERY_LONG)
    [trace] = setup.history.find("r")
    assert {cost.fabric for cost in trace.costs} == {""}
    response = ResponseHeaders("transfer=0.1;bytes=1000", prefill="p")
    placement.on_response_headers(response, NOW + 1.0)
    estimates = placement.decode.estimates
    assert (estimates.transfer.count, estimates.fabrics.fits) == (1, {})


@pytest.mark.parametrize(("decode", "path"), [("d1", "fallback"), ("d2", "unified")])
def test_a_lost_prefill_pod_counts_as_close_as_it_was(decode: str, path: str) -> None:
    """Only where transfers from its node were fast would a request have been split."""
    setup = PickerSetup()
    setup.fleet.apply(
        [at(backend("p", "prefill"), "n1"), at(backend(decode, "decode"), "n" + decode[1])]
    )
    estimates = setup[decode].estimates
    estimates.add_transfers((1.0, 1e9, 0.02), NOW, FabricClass.SAME_NODE)
    estimates.add_transfers((1.0, 1e9, 50.0), NOW, FabricClass.ELSEWHERE)
    estimates.learned()
    setup.down("p")
    assert setup.place(VERY_LONG)[1].path.value == path


def test_what_was_used_last_is_kept() -> None:
    values: RecentlyUsed[int, object] = RecentlyUsed()
    first = values.get(0, object)
    for key in range(1, MAX_NARROWED):
        values.get(key, object)
    assert values.get(0, object) is first
    second = values.get(1, object)
    # Two more: the two that were not used for longest go.
    for key in (-1, -2):
        values.get(key, object)
    assert values.get(0, object) is first
    assert values.get(1, object) is second
    assert values.get(-1, object) is not first
    values.clear()
    assert values.get(0, object) is not first


def test_a_narrowed_layout_has_the_allowed_pods_alone() -> None:
    fleet = fleet_of([(role, "1", True, ("n", "r")) for role in ("prefill", "decode", "decode")])
    whole = make_layout(fleet, tuple(fleet), None)
    assert whole.within(frozenset({0, 2})).decodes == (2,)


def test_a_subset_hint_follows_the_pods_health() -> None:
    setup = PickerSetup(d1="decode", d2="decode", p1="prefill", p2="prefill")
    subset = frozenset({"10.0.0.1", "10.0.0.3", "10.0.0.4"})
    request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"}, subset)
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    for lost, prefills in ((None, {"p1", "p2"}), ("p1", {"p2"})):
        if lost is not None:
            setup.down(lost)
        placement = setup.picker.place(request, body, NOW)
        assert {pod.name for pod in placement.prefill} == prefills


def test_a_decode_pod_without_a_partner_is_no_candidate_for_a_split() -> None:
    setup = PickerSetup()
    setup.fleet.apply(
        backend(name, role, hash_)
        for name, role, hash_ in (
            ("p", "prefill", "1"), ("d", "decode", "1"), ("other", "decode", "2")
        )
    )  # fmt: skip
    setup.place(VERY_LONG)
    [trace] = setup.history.find("r")
    assert {cost.pod for cost in trace.costs if cost.part == "decode"} == {"d"}
    assert {cost.pod for cost in trace.costs if cost.part == "unified"} == {"d", "other"}


@pytest.mark.parametrize(
    ("roles", "counts"),
    [
        pytest.param({"u1": "unified", "u2": "unified"}, True, id="unified pods alone"),
        pytest.param({"u1": "unified", "p": "prefill"}, False, id="one beside a prefill pod"),
        pytest.param({"d": "decode", "p": "prefill"}, False, id="separate pools"),
    ],
)
def test_busy_pods_cost_more_only_where_each_computes_its_own_prompts(
    roles: dict[str, str], counts: bool
) -> None:
    setup = PickerSetup(**roles)
    for pod in setup.fleet:
        pod.estimates.utilization.add(30.0, NOW)
    costs = place(setup, "m").decision.explanation
    assert costs is not None
    assert all(("congestion" in trace.terms) == counts for trace in costs.traces())


def adapter_setup() -> PickerSetup:
    """Two pods of each role; the second of each has the adapter `x`."""
    setup = PickerSetup(d1="decode", d2="decode", p1="prefill", p2="prefill")
    setup.fleet.apply(
        DiscoveredBackend(msgspec.structs.replace(pod.backend, models=("m", "x")))
        for pod in list(setup.fleet)
    )
    for pod in setup.fleet:
        running = frozenset({"x"} if pod.name[1] == "2" else ())
        reported = AdapterSlots(running, slots=2)
        pod.apply_scrape(ScrapeResult(Gauges(), b"", adapters=reported))
        setup.fleet.learn_adapters(reported)
    return setup


def place(setup: PickerSetup, model: str) -> Placement:
    body = json.dumps({"model": model, "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"})
    return setup.picker.place(request, body, NOW)


def test_both_legs_of_a_request_for_an_adapter_go_where_it_is_loaded() -> None:
    setup = adapter_setup()
    placements = [place(setup, "x") for _ in range(4)]
    assert {p.decision.path for p in placements} == {RoutingPath.PREFILL_THEN_DECODE.value}
    assert {(p.decode.name, p.prefill[0].name) for p in placements} == {("d2", "p2")}


def test_the_explanation_holds_what_loading_an_adapter_costs() -> None:
    costs = place(adapter_setup(), "x").decision.explanation
    assert costs is not None
    standing = {(c.pod, c.part): c.terms.get("standing", 0.0) for c in costs.traces()}
    assert standing["p1", "prefill"] == standing["d1", "decode"] == 0.3
    assert standing["p2", "prefill"] == standing["d2", "decode"] == 0.0
