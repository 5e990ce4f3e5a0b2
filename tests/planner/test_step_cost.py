"""Steps, and what fits would learn of them."""

import pytest

from tandem_planner.cost import PodFigures, RequestFigures, idle_prefill_seconds
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import AT_ONCE, simulate
from tandem_planner.simulation.routers import RoundRobin
from tandem_planner.simulation.work import Request
from tandem_planner.step_cost import (
    LinearStep,
    decode_cost,
    pairs,
    prefill_cost,
    prompt_seconds,
)

STEP = LinearStep(0.008, 1e-4, 2e-8, 1e-4, 2.5e-10)


def test_the_parts_of_a_linear_step_add_up() -> None:
    assert STEP.seconds(0, 0) == 0.008
    assert STEP.seconds(10, 1000) == pytest.approx(0.008 + 1e-3 + 2e-5)
    assert STEP.seconds(0, 0, 100, pairs(50, 150)) == pytest.approx(0.008 + 1e-2 + 5e-6)
    assert STEP.times(2.0).seconds(10, 1000) == pytest.approx(STEP.seconds(10, 1000) / 2)


def test_chunks_look_at_what_is_before_them() -> None:
    assert pairs(0, 300) == pairs(0, 100) + pairs(100, 300) == 300**2
    whole = prompt_seconds(STEP, 0, 300, budget=300)
    assert prompt_seconds(STEP, 0, 300, budget=100) == pytest.approx(whole + 2 * STEP.fixed)


def test_a_fit_of_prompts_in_one_step_has_the_steps_own_coefficients() -> None:
    cost = prefill_cost(STEP, 2000, budget=2000)
    assert cost == pytest.approx((STEP.fixed, STEP.per_token, STEP.per_pair))
    assert cost.seconds(500, 700) == pytest.approx(prompt_seconds(STEP, 700, 1200, 2000))


def test_a_fit_of_decodes_has_their_context_in_its_slope() -> None:
    cost = decode_cost(STEP, 100, 1000.0)
    assert cost.slope == pytest.approx(STEP.per_decode + 1000 * STEP.per_context)
    assert cost.step == pytest.approx(STEP.fixed)


def test_router_and_simulation_take_the_same_seconds_for_one_prompt() -> None:
    cost = prefill_cost(STEP, 2000, budget=2048)
    pod = PodFigures(fixed=cost.fixed, per_token=cost.per_token, per_pair=cost.per_pair)
    routed = idle_prefill_seconds(RequestFigures(1500, 10.0, 0.0), pod, cached=400)
    engine = Engine(STEP, cache_tokens=10_000, seed=0, noise=0.0)
    assert routed == pytest.approx(engine.prefill_seconds(400, 1500), rel=1e-9)
    router = RoundRobin([engine], 0)
    (served,) = simulate([Request(0.0, 1500, 1)], [engine], router, timing=AT_ONCE).served
    assert served.ttft == pytest.approx(cost.seconds(1500), rel=1e-9)


def test_router_and_simulation_take_the_same_seconds_between_tokens() -> None:
    """Ten answers of one context, as a fit of them has it and as an engine runs them."""
    decodes, context = 10, 2000
    cost = decode_cost(STEP, decodes, context)
    engine = Engine(STEP, cache_tokens=10**6, seed=0, noise=0.0)
    answer = Request(0.0, context - 20, 41, is_computed=True)
    works = [answer.work(index, 0.0) for index in range(decodes)]
    for work in works:
        engine.add(work)
    engine.advance(1e9)
    expected = pytest.approx(cost.step + cost.slope * decodes, rel=1e-4)
    assert [work.itl for work in works] == [expected] * decodes
