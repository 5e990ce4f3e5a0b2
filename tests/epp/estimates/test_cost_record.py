"""The costs of a decision: complete, sorted, and those of the choice."""

from typing import Any

import pytest

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.trace import CostTrace
from tandem_epp.estimates.cost_record import CostRecord
from tandem_planner.cost import HANDOFF_SECONDS, PodFigures, RequestFigures
from tandem_planner.transfer import TransferCost

from ..placement.test_picker import PickerSetup

REQUEST = RequestFigures(prompt=10_000, output=100.0, now=50.0)
NAMES = ("p-0", "p-1", "d-0", "d-1")
DECODE = PodFigures(stall=5.0, itl_harm=0.001)
PODS = (PodFigures(), PodFigures(queued=2.0), DECODE, DECODE)


def record(decode: int, prefill: int | None, **changes: Any) -> CostRecord:
    parts: dict[str, Any] = {
        "request": REQUEST, "names": NAMES, "pods": PODS, "cached": (0, 0, 0, 4_000),
        "cached_if_computing": (0, 0, 0, 4_000), "decodes": (2, 3), "prefills": (0, 1),
        "grouped": frozenset({2, 3}),
    }  # fmt: skip
    return CostRecord(**(parts | changes), decode=decode, prefill=prefill)


def named(record: CostRecord) -> dict[tuple[str, str], CostTrace]:
    return {(trace.part, trace.pod): trace for trace in record.traces()}


def test_every_candidate_of_each_part_is_listed_the_cheapest_first() -> None:
    assert [(trace.part, trace.pod) for trace in record(3, 0).traces()] == [
        ("unified", "d-1"), ("unified", "d-0"),
        ("prefill", "p-0"), ("prefill", "p-1"),
        ("decode", "d-1"), ("decode", "d-0"),
    ]  # fmt: skip


def test_the_terms_are_named_and_add_up() -> None:
    traces = named(record(3, 0))
    for trace in traces.values():
        assert trace.cost == pytest.approx(sum(trace.terms.values()))
        assert 0 not in trace.terms.values()
    assert traces["prefill", "p-1"].terms["wait"] == 2.0
    assert traces["decode", "d-0"].terms["handoff"] == HANDOFF_SECONDS
    assert traces["unified", "d-1"].cached_tokens == 4_000


@pytest.mark.parametrize(
    ("prefill", "chosen"),
    [(None, {("unified", "d-1")}), (0, {("prefill", "p-0"), ("decode", "d-1")})],
)
def test_the_chosen_pods_are_marked(prefill: int | None, chosen: set[tuple[str, str]]) -> None:
    traces = named(record(3, prefill))
    assert {key for key, trace in traces.items() if trace.chosen} == chosen


def test_a_decode_pod_is_listed_for_each_class_of_its_pairs() -> None:
    node, _, elsewhere = FabricClass
    fast, slow = TransferCost(0.001, 1e-11), TransferCost(0.002, 1e-10)
    pods = (*PODS[:2], *(DECODE._replace(transfers=(fast, slow, slow)),) * 2)
    fabrics = {2: (node, elsewhere), 3: (elsewhere,)}
    changes = {"pods": pods, "cached": (0,) * 4, "fabrics": fabrics}
    made = record(2, 0, **changes, fabric=node)
    decodes = [trace for trace in made.traces() if trace.part == "decode"]
    assert [(t.pod, t.fabric, t.chosen) for t in decodes] == [
        ("d-0", "same_node", True), ("d-0", "elsewhere", False), ("d-1", "elsewhere", False),
    ]  # fmt: skip
    near, far = (trace.terms["transfer"] for trace in decodes[:2])
    assert made.predict()[0] == pytest.approx(
        record(2, 0, **changes, fabric=elsewhere).predict()[0] - far + near
    )


def test_the_decode_pods_own_prefills_and_its_step_delay_the_first_token() -> None:
    busy = DECODE._replace(step=0.02, head_ends=REQUEST.now + 5.0, late_share=0.5)
    made = record(2, 0)
    later = record(2, 0, pods=(*PODS[:2], busy, DECODE), ready=made.traces()[2].cost)
    ready = later.traces()[2].cost
    assert ready < 5.0
    assert named(later)["decode", "d-0"].terms["join"] == pytest.approx(5.0 - ready + 0.02)
    first_token, handoff, join = later.predict()
    assert join == pytest.approx(5.0 - ready + 0.02)
    assert first_token == pytest.approx(made.predict()[0] + join)
    assert (handoff, record(2, None).predict()[1]) == (HANDOFF_SECONDS, 0.0)


def test_a_placed_request_is_explained_without_its_prompt() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place("secret " * 4000)
    [trace] = setup.history.find("r")
    assert {cost.part for cost in trace.costs} == {"unified", "prefill", "decode"}
    chosen = [cost for cost in trace.costs if cost.chosen]
    assert {cost.pod for cost in chosen} == {"d", *(pod.name for pod in placement.prefill)}
    first_token = ("wait", "prefill", "transfer", "handoff", "join")
    seconds = [cost.terms.get(name, 0.0) for cost in chosen for name in first_token]
    assert trace.predicted_ttft == pytest.approx(sum(seconds))
