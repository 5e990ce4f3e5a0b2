"""Rows of routers, and which rivals the picker is measured against."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks.routing_load import Load
from benchmarks.routing_rivals import (
    BOUND,
    PICKER,
    SEPARATE,
    UNIFIED,
    Row,
    compare,
    row_of,
    targets,
)

from tests.epp.simulation.regimes import REGIMES

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = [pytest.mark.interpreted, pytest.mark.long]


def row(ttft: float, itl: float, *goodput: float) -> Row:
    return Row(ttft / 10, ttft, ttft / 2, itl, goodput, 0.0, 0.5)


def test_each_figure_is_compared_with_the_best_rival_in_it() -> None:
    rows = {
        PICKER: row(10.0, 0.040, 0.8, 0.5, 0.9),
        "Dynamo": row(10.5, 0.080, 0.4, 0.6, 0.9),
        "SGLang": row(20.0, 0.020, 0.2, 0.1, 0.1),
        BOUND: row(5.0, 0.010, 0.9, 0.9, 0.9),
    }
    figures = {figure.name: figure for figure in targets(UNIFIED, rows)}
    assert figures["2 s/50 ms goodput, over the best rival's"].value == 2.0
    assert not figures["2 s/25 ms goodput, over the best rival's"].holds
    # SGLang answers later than the picker by more than a tenth.
    assert figures["p99 ITL, over the best rival's with p99 TTFT within 10 %"].value == 0.5
    assert figures["p99 TTFT, over the best rival's"].holds
    assert not figures["2 s/50 ms goodput, over the clairvoyant's"].holds


def test_separate_pools_are_compared_with_those_that_always_split() -> None:
    rows = {
        PICKER: row(10.0, 0.022, 0.8, 0.9),
        "Dynamo": row(12.0, 0.020, 0.6, 0.9),
        "Dynamo, conditional": row(11.0, 0.010, 0.7, 0.8),
    }
    figures = {figure.name: figure for figure in targets(SEPARATE, rows)}
    assert figures["p99 ITL, over the best of those that split every request"].holds
    assert figures["2 s/50 ms goodput, over the best rival's"].target == ">= 1.1"


def test_without_rivals_there_is_nothing_to_reach() -> None:
    assert targets(UNIFIED, {PICKER: row(1.0, 0.01, 1.0, 1.0, 1.0)}) == []


@pytest.mark.parametrize("regime", sorted(REGIMES.keys() - {"100 pods"}))
def test_every_regime_serves_all_of_its_requests(regime: str) -> None:
    load = Load(None, 1.0, 40, regime)
    measured = row_of(UNIFIED, "llm-d, default", load, seed=0)
    assert measured.goodput[2] > 0.2
    assert measured.split == 0


def test_a_row_for_each_router(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        names = ["llm-d, default", "SGLang"]
        figures = compare(SEPARATE, Load(None, 1.0, 20), 1, pool, names)
    assert figures
    out = capsys.readouterr().out
    assert all(name in out for name in (PICKER, *names))
    assert "Dynamo" not in out
