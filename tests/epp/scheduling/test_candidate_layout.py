"""Which pods a request may go to, and what an adapter adds to their costs."""

import json
from dataclasses import fields

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.paths import RoutingPath
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import Gauges, ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.ext_proc.messages import HttpRequest
from tandem_epp.placement import Placement
from tandem_epp.scheduling.candidate_layout import CandidateLayout, make_layout
from tests.epp.test_picker import LONG, NOW, PickerSetup, backend

PODS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "unified"]), st.sampled_from("12"), st.booleans()
    ),
    min_size=1,
    max_size=8,
)
"""Role, compat hash, and whether the gateway allows the pod."""


def fleet_of(pods: list[tuple[str, str, bool]]) -> Fleet:
    setup = PickerSetup()
    setup.fleet.apply([backend(f"pod-{i}", role, hash_) for i, (role, hash_, _) in enumerate(pods)])
    return setup.fleet


def comparable(layout: CandidateLayout) -> dict[str, object]:
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    values["groups"] = {(group.prefills, group.decodes) for group in layout.groups}
    return values


@given(pods=PODS)
def test_a_layout_within_a_subset_is_that_of_the_subset(pods: list[tuple[str, str, bool]]) -> None:
    fleet = fleet_of(pods)
    ready = tuple(fleet)
    some = tuple(pod for pod, (_, _, allowed) in zip(fleet, pods, strict=True) if allowed)
    within = make_layout(fleet, ready, None).within(
        frozenset(fleet.figures.rows[pod] for pod in some)
    )
    assert comparable(within) == comparable(make_layout(fleet, some, None))


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
