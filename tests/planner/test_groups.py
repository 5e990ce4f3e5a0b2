"""Fabric classes in the choice: nothing is cheaper than the chosen pair, over all pairs."""

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem_contract.fabric_classes import FabricClass
from tandem_planner.choice import PREFILL_CANDIDATES, Candidates, Choice, choose
from tandem_planner.cost import (
    PodFigures,
    RequestFigures,
    decode_terms,
    is_transfer_too_long,
    prefill_terms,
    tie_seconds,
    unified_terms,
)
from tandem_planner.fabrics import Place, fabric_class
from tandem_planner.figure_table import FigureTable
from tandem_planner.groups import make_group
from tandem_planner.transfer import TransferCost

from .test_choice import NOW, PODS, REQUESTS

DOMAIN_OF = {"n1": "a", "n2": "a", "n3": "b", "n4": "b", "n5": None, "n6": None}
PLACES = st.one_of(
    st.sampled_from([Place(*place) for place in DOMAIN_OF.items()]),
    st.sampled_from([Place(None, "a"), Place(None, "b"), Place()]),
)
FLEETS = st.lists(st.tuples(PODS, st.integers(0, 5000), PLACES), min_size=1, max_size=7)
Pairs = Mapping[tuple[int, int], float]


def pair_costs(
    request: RequestFigures,
    candidates: Candidates,
    places: Sequence[Place],
) -> Pairs:
    """(prefill pod, decode pod) → the cost of the pair; inf where the transfer takes too long."""
    pods, costs = candidates.pods.pods, {}
    [group] = candidates.groups
    ready = least_prefill(request, candidates)
    for p, d in product(group.prefills, group.decodes):
        if p == d:
            continue
        decode = (request, pods[d], candidates.cached[d], fabric_class(places[p], places[d]))
        prefill = sum(prefill_terms(request, pods[p], candidates.cached[p]))
        is_too_long = is_transfer_too_long(*decode)
        costs[p, d] = inf if is_too_long else prefill + sum(decode_terms(*decode, ready))
    return costs


def least_prefill(request: RequestFigures, candidates: Candidates) -> float:
    pods, [group] = candidates.pods.pods, candidates.groups
    return min(sum(prefill_terms(request, pods[p], candidates.cached[p])) for p in group.prefills)


@given(
    request=REQUESTS,
    prefills=FLEETS,
    decodes=FLEETS,
    count=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_nothing_is_cheaper_than_the_chosen_pair(
    request: RequestFigures,
    prefills: list[tuple[PodFigures, int, Place]],
    decodes: list[tuple[PodFigures, int, Place]],
    count: int,
    seed: int,
) -> None:
    pods, cached, places = map(list, zip(*prefills, *decodes, strict=True))
    which = range(len(prefills)), range(len(prefills), len(pods))
    candidates = Candidates(
        FigureTable(pods),
        cached,
        cached,
        which[1],
        [make_group(*which, places)],
        max_unsplit_tokens=-sys.maxsize,
    )
    made = choose(request, candidates, Random(seed), count=count)
    pairs = pair_costs(request, candidates, places)
    unified = {d: sum(unified_terms(request, pods[d], cached[d])) for d in which[1]}
    least, alone = min(pairs.values()), min(unified.values())
    assert made.cost == pytest.approx(min(least, alone))
    assert made.other_path_cost == pytest.approx(max(least, alone)) or abs(least - alone) < 1e-9
    if made.prefills:
        _check_pair(made, pairs, count, places)
    else:
        d = made.decodes[0]
        is_too_long = all(pairs[p, d] == inf for p in which[0])
        ready = least_prefill(request, candidates)
        terms = decode_terms(request, pods[d], cached[d], ready=ready)
        without_transfer = sum(terms) - terms.transfer + ready
        if abs(without_transfer - alone) > 1e-9:
            is_worth_it = without_transfer < alone
            assert made.is_transfer_too_long is (is_too_long and is_worth_it)


SIDES = st.sampled_from(["prefill", "decode", "both"])


@given(
    request=REQUESTS,
    fleet=st.lists(st.tuples(PODS, st.integers(0, 5000), PLACES, SIDES), min_size=2, max_size=9),
    count=st.integers(1, 3),
    knows_places=st.booleans(),
    seed=st.integers(0, 9),
)
def test_of_pods_that_do_both_none_prefills_for_itself(
    request: RequestFigures,
    fleet: list[tuple[PodFigures, int, Place, str]],
    count: int,
    knows_places: bool,
    seed: int,
) -> None:
    pods, cached, known, sides = map(list, zip(*fleet, strict=True))
    places = known if knows_places else [Place()] * len(pods)
    prefills = [row for row, side in enumerate(sides) if side != "decode"]
    decodes = [row for row, side in enumerate(sides) if side != "prefill"]
    assume(prefills and decodes and prefills != decodes[:1])
    group = make_group(prefills, decodes, known if knows_places else None)
    candidates = Candidates(
        FigureTable(pods), cached, cached, decodes, [group], max_unsplit_tokens=-sys.maxsize
    )
    made = choose(request, candidates, Random(seed), count=count)
    pairs = pair_costs(request, candidates, places)
    alone = min(sum(unified_terms(request, pods[d], cached[d])) for d in decodes)
    least = min(pairs.values(), default=inf)
    assert made.cost == pytest.approx(min(least, alone))
    if abs(least - alone) > 1e-9:
        assert bool(made.prefills) is (least < alone)
    if made.prefills:
        _check_pair(made, pairs, count, places)
    classes = [
        tuple(sorted({fabric_class(places[p], places[d]) for p in prefills if p != d}))
        for d in decodes
    ]
    assert list(group.pair_classes()) == classes


def _check_pair(made: Choice, pairs: Pairs, count: int, places: Sequence[Place]) -> None:
    p, d = made.prefills[0], made.decodes[0]
    assert pairs[p, d] <= made.cost + 2 * tie_seconds(made.cost) + 1e-9
    assert made.fabric is fabric_class(places[p], places[d])
    # Retries: the cheapest for this decode pod, whatever their class.
    usable = sorted(cost for (_, other), cost in pairs.items() if other == d and cost < inf)
    retries = sorted(pairs[retry, d] for retry in made.prefills)
    assert len(made.prefills) == len({*made.prefills}) == min(PREFILL_CANDIDATES, len(usable))
    assert retries == pytest.approx(usable[: len(retries)], abs=tie_seconds(made.cost) + 1e-9)
    # Alternates can read this prefill pod's KV in time.
    readers = [cost for (other, _), cost in pairs.items() if other == p and cost < inf]
    assert len(made.decodes) == len({*made.decodes}) == min(count, len(readers))
    assert all(pairs[p, alternate] < inf for alternate in made.decodes)


@given(prefills=st.lists(PLACES, min_size=1), decodes=st.lists(PLACES, min_size=1))
def test_a_group_knows_the_class_of_each_pair(prefills: list[Place], decodes: list[Place]) -> None:
    places = [*prefills, *decodes]
    group = make_group(
        range(len(prefills)), range(len(prefills), len(prefills) + len(decodes)), places
    )
    classes = [[fabric_class(p, d) for p in prefills] for d in decodes]
    assert list(group.pair_classes()) == [tuple(sorted({*of_pod})) for of_pod in classes]
    if group.neighbours is None:
        assert {fabric for of_pod in classes for fabric in of_pod} == {group.fabric}
    else:
        for at, of_pod in enumerate(classes):
            pairs = range(len(prefills))
            assert [group.neighbours.pair_class(p, at) for p in pairs] == of_pod
            costs = group.neighbours.pair_costs(at, [0.0] * len(prefills), [0.0, 1.0, 2.0])
            assert costs == of_pod
        for at in range(len(prefills)):
            expected = [of_pod[at] for of_pod in classes]
            assert group.neighbours.classes_from(at) == expected


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (None, FabricClass.ELSEWHERE),
        ([Place(), Place(), Place()], FabricClass.ELSEWHERE),
        ([Place("n"), Place("n"), Place("n")], FabricClass.SAME_NODE),
        ([Place("n", "r"), Place("m", "r"), Place("o", "r")], FabricClass.SAME_DOMAIN),
        ([Place("n"), Place("m"), Place("o")], FabricClass.ELSEWHERE),
    ],
)
def test_one_class_is_chosen_from_as_without_classes(
    places: list[Place] | None, expected: FabricClass
) -> None:
    group = make_group((0,), (1, 2), places)
    assert (group.neighbours, group.fabric) == (None, expected)


SLOW, FAST = TransferCost(0.002, 3e-10), TransferCost(0.002, 2e-11)
PREFILL = PodFigures()
DECODE = PodFigures(stall=1.0, transfers=(FAST, SLOW, SLOW))
PAIRS = [Place("n1"), Place("n1"), Place("n2"), Place("n2")]


def chosen(pods: Sequence[PodFigures], seed: int = 0) -> Choice:
    """Rows 0 and 2 prefill, rows 1 and 3 decode; each node has one of both."""
    group = make_group((0, 2), (1, 3), PAIRS)
    candidates = Candidates(FigureTable(pods), [0] * 4, [0] * 4, (1, 3), [group])
    return choose(RequestFigures(8000, 10.0, NOW), candidates, Random(seed))


def test_a_pair_on_one_node_is_preferred_and_drawn_among_equals() -> None:
    made = [chosen([PREFILL, DECODE, PREFILL, DECODE], seed) for seed in range(40)]
    assert {(m.prefills[0], m.decodes[0]) for m in made} == {(0, 1), (2, 3)}
    assert {m.fabric for m in made} == {FabricClass.SAME_NODE}
    assert all(len(m.prefills) == 2 for m in made), "the retry is elsewhere"


def test_a_queue_on_the_node_outweighs_a_faster_transfer() -> None:
    busy = PREFILL._replace(queued=5.0)
    made = chosen([busy, DECODE, PREFILL, DECODE._replace(itl_harm=1.0)])
    assert (made.prefills[0], made.decodes[0], made.fabric) == (2, 1, FabricClass.ELSEWHERE)


def test_a_slow_network_rules_out_only_the_pairs_that_use_it() -> None:
    decode = DECODE._replace(transfers=(FAST, FAST, TransferCost(0.002, 1e-8)))
    made = [chosen([PREFILL, decode, PREFILL, decode], seed) for seed in range(20)]
    assert {(*m.prefills, *m.decodes) for m in made} == {(0, 1), (2, 3)}
    blocked = PREFILL._replace(queued=30.0)
    alone = chosen([blocked, decode, blocked, decode])
    assert (alone.prefills, alone.is_transfer_too_long) == ((), False)


def test_a_nearer_pair_that_is_slower_is_not_preferred() -> None:
    decode = DECODE._replace(transfers=(SLOW, SLOW, FAST))
    made = [chosen([PREFILL, decode, PREFILL, decode], seed) for seed in range(20)]
    assert {(m.prefills[0], m.decodes[0]) for m in made} == {(0, 3), (2, 1)}
