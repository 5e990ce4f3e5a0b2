"""What objectives change in the cost and in the choice."""

from math import inf
from random import Random

import pytest

from tandem_planner.choice import Candidates, choose
from tandem_planner.cost import PodFigures, RequestFigures, prefill_terms
from tandem_planner.figure_table import FigureTable
from tandem_planner.objective import (
    FAST,
    ITL_WEIGHT,
    LOST_SHARE,
    MAX_WEIGHT,
    NO_OBJECTIVE,
    SLOW,
    Objective,
    answer_weight,
    in_time,
    make_objective,
    missed,
    pressure,
    too_late,
)
from tandem_planner.pod_costs import add_misses, prefill_costs

NOW = 50.0
OBJECTIVE = make_objective(2.0, 0.025, 0.9)
POD = PodFigures(fixed=0.01, per_token=1e-4, per_pair=1e-9)


def request(prompt: int, objective: Objective = OBJECTIVE) -> RequestFigures:
    return RequestFigures(prompt, 100.0, NOW, objective=objective)


def choice(figures: RequestFigures, *pods: PodFigures) -> int:
    """The row that serves the request."""
    nothing = [0] * len(pods)
    candidates = Candidates(FigureTable(pods), nothing, nothing, range(len(pods)))
    return choose(figures, candidates, Random(0)).decodes[0]


def test_an_answer_delayed_by_all_of_its_itl_counts_as_a_missed_first_token() -> None:
    assert (ITL_WEIGHT + OBJECTIVE.stall) * 0.025 == pytest.approx(OBJECTIVE.miss)


def test_the_higher_the_attainment_the_more_latency_a_miss_is_worth() -> None:
    misses = [make_objective(2.0, 0.05, share).miss for share in (0.01, 0.5, 0.9, 0.99, 1.0)]
    assert misses == sorted(misses)
    assert misses[0] == pytest.approx(2.0, abs=0.02)
    assert misses[-2:] == pytest.approx([2.0 * MAX_WEIGHT] * 2)


def test_either_time_may_be_left_out() -> None:
    first, between = make_objective(2.0, None, 0.9), make_objective(None, 0.05, 0.9)
    both = make_objective(2.0, 0.05, 0.9)
    assert (first.miss, first.stall, first.itl) == (both.miss, 0.0, inf)
    assert (between.stall, between.ttft) == (pytest.approx(both.stall), inf)
    assert missed(1e6, inf) == 0.0


def test_an_answer_may_miss_its_itl_on_a_pod_that_is_about_as_slow() -> None:
    assert [pressure(load) for load in (0.0, FAST, (FAST + SLOW) / 2, SLOW, 9.0)] == pytest.approx(
        [0.0, 0.0, 0.5, 1.0, 1.0]
    )


def test_a_first_token_may_come_earlier_or_later_than_predicted() -> None:
    assert [missed(s, 2.0) for s in (0.0, in_time(2.0), 2.0, too_late(2.0), 9.0)] == pytest.approx(
        [0.0, 0.0, 0.5, 1.0, 1.0]
    )


def test_an_answer_that_came_too_late_gives_way() -> None:
    assert answer_weight(0.1, OBJECTIVE) == 1.0
    assert answer_weight(10.0, OBJECTIVE) == pytest.approx(LOST_SHARE)
    assert answer_weight(10.0, NO_OBJECTIVE) == 1.0


@pytest.mark.parametrize("objective", [OBJECTIVE, make_objective(None, 0.05, 0.5)])
@pytest.mark.parametrize("prompt", [100, 15_000, 100_000])
def test_the_terms_add_up_to_the_cost(prompt: int, objective: Objective) -> None:
    pods = [
        POD._replace(head_ends=NOW + 0.8, late_share=0.5, queued=0.3, stall=0.4),
        POD._replace(head_ends=NOW - 2.0, late_share=0.5, load=0.1, congestion=0.5),
        POD._replace(standing=0.7, itl_harm=0.1),
    ]
    figures, cached = request(prompt, objective), [0, 50, 5]
    sums = [sum(prefill_terms(figures, pod, hit)) for pod, hit in zip(pods, cached, strict=True)]
    table = FigureTable(pods)
    costs = prefill_costs(figures, table, cached)
    add_misses(costs, figures, table, cached)
    assert costs == pytest.approx(sums)
    if objective.ttft == inf:
        assert costs == prefill_costs(figures, table, cached)


def test_a_request_goes_where_its_first_token_is_in_time() -> None:
    # Elsewhere it harms others less, but misses its own objective.
    busy = POD._replace(queued=2.0)
    harmful = POD._replace(stall=2.0)
    assert choice(request(8_000), busy, harmful) == 1
    assert choice(request(8_000, NO_OBJECTIVE), busy._replace(queued=1.0), harmful) == 0


def test_a_request_that_is_late_everywhere_spares_others() -> None:
    idle, with_late_answers = POD._replace(stall=2.0), POD._replace(queued=3.0, stall=0.2)
    assert choice(request(8_000), idle, with_late_answers) == 0
    assert choice(request(60_000), idle, with_late_answers) == 1
