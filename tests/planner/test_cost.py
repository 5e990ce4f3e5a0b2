"""The terms of the cost, one by one."""

from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_planner.cost import (
    HANDOFF_SECONDS,
    MOST_REUSED,
    MOST_UTILIZATION,
    STREAMED_SHARE,
    PodFigures,
    RequestFigures,
    congestion,
    decode_terms,
    eviction,
    is_transfer_too_long,
    prefill_terms,
    unified_terms,
    wait_seconds,
)
from tandem_planner.figure_table import FigureTable
from tandem_planner.kv_size import KvSize
from tandem_planner.pod_costs import prefill_costs, unified_costs
from tandem_planner.transfer import TransferCost

REQUEST = RequestFigures(prompt=1000, output=100.0, now=50.0)
POD = PodFigures(fixed=0.01, per_token=1e-4, per_pair=1e-9)


def test_an_idle_pod_costs_its_prefill() -> None:
    terms = unified_terms(REQUEST, POD, 0)
    assert terms.prefill == pytest.approx(0.01 + 0.1 + 0.001)
    assert sum(terms) == terms.first_token == terms.prefill


def test_cached_tokens_are_not_computed_but_attended_to() -> None:
    terms = unified_terms(REQUEST, POD, 900)
    assert terms.prefill == pytest.approx(0.01 + 0.01 + 1e-9 * (100 * 100 + 2 * 100 * 900))


@pytest.mark.parametrize("cached", [1000, 5000])
def test_a_prompt_in_the_cache_still_computes_one_token(cached: int) -> None:
    assert 0.01 < unified_terms(REQUEST, POD, cached).prefill < 0.0102


@pytest.mark.parametrize(
    ("head_ends", "late_share", "queued", "wait"),
    [
        pytest.param(0.0, 0.0, 0.0, 0.0, id="nothing ahead"),
        pytest.param(52.0, 0.5, 0.0, 2.0, id="one prefill"),
        pytest.param(52.0, 0.5, 3.0, 5.0, id="and those behind it"),
        pytest.param(44.0, 0.5, 3.0, 6.0, id="late by six seconds: half of that again"),
    ],
)
def test_wait(head_ends: float, late_share: float, queued: float, wait: float) -> None:
    pod = PodFigures(head_ends, late_share, queued)
    assert wait_seconds(pod, 50.0) == wait
    assert unified_terms(REQUEST, pod, 0).wait == prefill_terms(REQUEST, pod, 0).wait == wait


def test_harm() -> None:
    pod = POD._replace(stall=2.0, itl_harm=0.004, standing=1.5, congestion=0.5)
    terms = unified_terms(REQUEST, pod, 0)
    assert terms.stall == 2 * terms.prefill
    assert terms.congestion == terms.prefill / 2 == prefill_terms(REQUEST, pod, 0).congestion
    assert terms.decode == pytest.approx(0.4)
    assert terms.standing == 1.5
    assert terms.first_token == terms.prefill


@pytest.mark.parametrize(("free", "share"), [(inf, 0), (1100, 0), (550, 0.5), (0, 1), (-100, 1)])
def test_preemption(free: float, share: float) -> None:
    pod = POD._replace(free_tokens=free)
    assert unified_terms(REQUEST, pod, 0).preemption == pytest.approx(share * 0.111)
    assert decode_terms(REQUEST, pod, 0).preemption == pytest.approx(share * 0.111)


@pytest.mark.parametrize(("free", "share"), [(1100, 0), (550, 0.5), (0, 1)])
def test_what_is_loaded_needs_room_as_what_is_computed(free: float, share: float) -> None:
    pod = POD._replace(free_tokens=free, load=0.01, loaded=800)
    assert unified_terms(REQUEST, pod, 800).preemption == pytest.approx(share * 0.111)
    # A decode pod that gets all KV by a transfer loads nothing.
    assert decode_terms(REQUEST, pod, 0).preemption == pytest.approx(share * 0.111)


def test_no_more_is_loaded_than_counts_as_cached() -> None:
    pod = POD._replace(free_tokens=550, load=0.01, loaded=800)
    assert unified_terms(REQUEST, pod, 100).preemption == pytest.approx(0.5 * 0.111)
    table = FigureTable([pod])
    prefills = prefill_costs(REQUEST, table, [100])
    [cost] = unified_costs(REQUEST, table, [100], [0], prefills)
    assert cost == pytest.approx(sum(unified_terms(REQUEST, pod, 100)))


def test_a_split_transfers_what_the_decode_pod_lacks() -> None:
    pod = POD._replace(transfers=(TransferCost(0.1, 1e-6),) * 3, kv=KvSize(10.0))
    terms = decode_terms(REQUEST, pod, 400)
    assert terms.transfer == pytest.approx(0.1 + 600 * 10e-6)
    assert terms.handoff == HANDOFF_SECONDS
    assert terms.prefill == terms.wait == terms.stall == 0


def test_a_streamed_transfer_is_waited_for_in_part_and_judged_as_a_whole() -> None:
    request = RequestFigures(8000, 10.0, 0.0)
    # 8,000 tokens: 0.8 s of prefill, 0.3 s of transfer.
    slow = TransferCost(0.002, 0.3 / (8000 * 1e5))
    sequential = POD._replace(transfers=(slow,) * 3, kv=KvSize(1e5))
    streamed = sequential._replace(exposed=STREAMED_SHARE)
    assert decode_terms(request, sequential, 0).transfer == pytest.approx(0.302)
    assert decode_terms(request, streamed, 0).transfer == pytest.approx(0.032)
    assert not is_transfer_too_long(request, streamed, 0)
    slower = TransferCost(0.002, 0.6 / (8000 * 1e5))
    assert is_transfer_too_long(request, streamed._replace(transfers=(slower,) * 3), 0)


@pytest.mark.parametrize(
    ("utilization", "harm"),
    [
        pytest.param(0.0, 0.0, id="an idle pod"),
        pytest.param(0.5, 1.0, id="half: as much work waits behind as is in front"),
        pytest.param(0.8, 4.0, id="busy"),
        pytest.param(1.5, MOST_UTILIZATION / (1 - MOST_UTILIZATION), id="more than it can do"),
    ],
)
def test_a_busy_pod_makes_later_prompts_wait(utilization: float, harm: float) -> None:
    assert congestion(utilization) == pytest.approx(harm)


def observed(followed: float, x: float) -> tuple[float, float]:
    """`reused` and `age` where a share `followed` of the uses is followed by another one, after a
    time that is exponential and on average x times shorter than that to the eviction."""
    return followed * (1.0 - exp(-x)), 1.0 / x - 1.0 / (exp(x) - 1.0)


@given(st.floats(0.1, 0.9), st.floats(0.5, 4.0))
def test_eviction_is_what_its_model_says(followed: float, x: float) -> None:
    reused, age = observed(followed, x)
    lost = followed * (1.0 + x) * exp(-x) / (1.0 - reused)
    assert eviction(reused, age) == pytest.approx(lost, rel=0.15, abs=0.03)


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_eviction_is_bounded(reused: float, age: float) -> None:
    assert 0.0 <= eviction(reused, age) <= 1.0 / (1.0 - MOST_REUSED) + 1e-9


@pytest.mark.parametrize(
    ("reused", "age"),
    [
        pytest.param(0.0, 0.0, id="nothing is used again"),
        pytest.param(*observed(0.75, 8.0), id="what is used again is so long before its eviction"),
    ],
)
def test_no_room_is_missed(reused: float, age: float) -> None:
    assert eviction(reused, age) == 0.0


def test_a_cache_that_turns_over_sooner_has_less_room_to_lose() -> None:
    harms = [eviction(*observed(0.75, x)) for x in (8.0, 4.0, 2.0, 1.0)]
    assert harms == sorted(harms)


def test_a_full_cache_costs_in_proportion_to_what_it_takes_in() -> None:
    pod = POD._replace(eviction=0.5)
    terms = unified_terms(REQUEST, pod, 400)
    assert terms.eviction == prefill_terms(REQUEST, pod, 400).eviction == terms.prefill / 2
    assert terms.first_token == unified_terms(REQUEST, POD, 400).first_token
    assert decode_terms(REQUEST, pod, 400).eviction == 0.0
