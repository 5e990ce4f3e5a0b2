"""The prefill fit against engines whose truth is known: alone, in batches, cold and disturbed."""

from math import nan
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_planner.prefill_fit import (
    PREFILL_PRIOR,
    PrefillCost,
    PrefillFit,
    PrefillSample,
    prefill_sample,
)

SLOW = PrefillCost(0.03, 2.5e-3, 4e-8)
"""An engine on a CPU: 400 tokens per second."""
TRUTHS = st.builds(
    lambda fixed, per_token, bend: PrefillCost(fixed, per_token, per_token * bend),
    st.floats(1e-3, 0.05),
    st.floats(5e-5, 5e-3),
    st.floats(1e-7, 2.5e-5),
)
"""From a small GPU to a CPU; attention doubles a token's cost from position 20,000 on, or later."""
SEEDS = st.integers(0, 999)


def seconds_of(truth: PrefillCost, prompts: list[tuple[float, float]]) -> float:
    return sum(truth.seconds(*prompt) for prompt in prompts)


def median_error(fit: PrefillFit, truth: PrefillCost) -> float:
    lengths = range(200, 3501, 100)
    return median(abs(fit.cost.seconds(n) / truth.seconds(n) - 1.0) for n in lengths)


def learn(
    truth: PrefillCost, random: Random, *, batch: int = 1, outliers: float = 0.0, count: int = 50
) -> PrefillFit:
    fit = PrefillFit()
    # The first one is cold.
    fit.add(prefill_sample([(500, 0)], 20 * truth.seconds(500)), 0.0)
    for i in range(count):
        prompts = [
            (float(random.randint(20, 4000)), float(random.choice((0, 0, 1000))))
            for _ in range(random.randint(1, batch))
        ]
        seconds = seconds_of(truth, prompts) * random.uniform(0.85, 1.15)
        if random.random() < outliers:
            seconds *= random.uniform(3, 20)
        fit.add(prefill_sample(prompts, seconds), float(i))
    return fit


@settings(max_examples=40)
@given(truth=TRUTHS, seed=SEEDS)
def test_fifty_requests_alone(truth: PrefillCost, seed: int) -> None:
    assert median_error(learn(truth, Random(seed)), truth) <= 0.15


@settings(max_examples=40)
@given(truth=TRUTHS, seed=SEEDS)
def test_fifty_batches(truth: PrefillCost, seed: int) -> None:
    assert median_error(learn(truth, Random(seed), batch=6), truth) <= 0.15


@settings(max_examples=40)
@given(truth=TRUTHS, seed=SEEDS)
def test_a_tenth_of_outliers(truth: PrefillCost, seed: int) -> None:
    assert median_error(learn(truth, Random(seed), outliers=0.1), truth) <= 0.15


CHUNK = 2048
"""vLLM's `max_num_batched_tokens`, in tokens."""
STEPPED = PrefillCost(0.0035, 6e-6, 3.5e-9)
"""A small model with real vLLM on one core of a CPU: 5 ms for 200 tokens, 70 ms for 3,500."""


def stepped_seconds(tokens: float, cached: float = 0.0) -> float:
    """An engine that computes a prompt in steps of CHUNK tokens, each of which takes 8 ms more: the
    time jumps where another step begins, which the fit's formula does not have."""
    return STEPPED.seconds(tokens, cached) + 0.008 * ((tokens - 1) // CHUNK)


def stepped_error(seed: int, *, overhead: float = 0.0, batch: int = 1) -> float:
    """Median error after fifty requests; `overhead`: seconds of each that are no prefill."""
    random, fit = Random(seed), PrefillFit()
    fit.add(prefill_sample([(500, 0)], 1.0), 0.0)
    for i in range(50):
        prompts = [(float(random.randint(200, 3500)), 0.0) for _ in range(random.randint(1, batch))]
        seconds = sum(stepped_seconds(*prompt) for prompt in prompts) * random.uniform(0.9, 1.1)
        fit.add(prefill_sample(prompts, seconds + overhead), float(i))
    lengths = range(200, 3501, 100)
    return median(abs(fit.cost.seconds(n) / stepped_seconds(n) - 1.0) for n in lengths)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_engine_that_computes_in_steps_is_learned(batch: int) -> None:
    """No term for steps is needed: what they make the fit err by is within the limit."""
    assert max(stepped_error(seed, batch=batch) for seed in range(20)) <= 0.1


def test_time_that_is_no_prefill_spoils_the_fit_more_than_steps_do() -> None:
    """So it is measured and subtracted before (`tandem_epp.estimates.own_requests`)."""
    assert min(stepped_error(seed, overhead=0.006) for seed in range(20)) > 0.15


def test_without_samples_it_is_the_prior() -> None:
    fit = PrefillFit()
    assert (fit.cost, fit.count, fit.updated_at) == (PREFILL_PRIOR, 0, None)


def test_the_first_sample_counts_until_the_second_and_again_after_a_restart() -> None:
    fit = PrefillFit()
    cold = prefill_sample([(1000, 0)], 60.0)
    for _ in range(2):
        fit.add(cold, 0.0)
        assert fit.cost.seconds(1000) == pytest.approx(60.0)
        fit.add(prefill_sample([(1000, 0)], SLOW.seconds(1000)), 1.0)
        assert (fit.count, fit.updated_at) == (1, 1.0)
        assert fit.cost.seconds(1000) == pytest.approx(SLOW.seconds(1000))
        fit.restart()
        assert fit.cost == PREFILL_PRIOR


def test_what_is_no_measurement_does_not_replace_the_first_sample() -> None:
    fit = PrefillFit()
    fit.add(prefill_sample([(1000, 0)], 60.0), 0.0)
    fit.add(prefill_sample([(1000, 0)], nan), 1.0)
    assert fit.cost.seconds(1000) == pytest.approx(60.0)


@pytest.mark.parametrize("sample", [PrefillSample(1, 0, 0, 1.0), PrefillSample(1, 100, 10_000, 0)])
def test_a_sample_without_tokens_or_seconds_is_ignored(sample: PrefillSample) -> None:
    fit = PrefillFit()
    for _ in range(3):
        fit.add(sample, 0.0)
    assert fit.count == 0


def test_a_long_prompt_is_predicted_from_short_ones() -> None:
    fit = learn(PrefillCost(0.01, 2e-4, 1e-9), Random(5))
    truth = PrefillCost(0.01, 2e-4, 1e-9).seconds(100_000)
    assert fit.cost.seconds(100_000) == pytest.approx(truth, rel=0.5)


def test_cached_tokens_cost_attention_only() -> None:
    cost = PrefillCost(0.0, 1e-4, 1e-9)
    assert cost.seconds(1000, 99_000) == pytest.approx(0.1 + 1e-9 * (1e6 + 2 * 1000 * 99_000))
    assert cost.seconds(0, 5000) == 0.0


def test_another_engines_figures_are_the_start() -> None:
    fit = PrefillFit()
    fit.set_prior(SLOW)
    assert (fit.cost, fit.count) == (SLOW, 0)


@pytest.mark.parametrize("together", [1, 2, 3, 4])
def test_an_engine_whose_attention_dominates_is_learned_from_batches(together: int) -> None:
    """Between two scrapes of a fast engine several requests end: only their sums are known."""
    truth, random = PrefillCost(5e-4, 7e-6, 4.5e-9), Random(together)
    lengths = [random.randint(200, 3500) for _ in range(48)]
    seconds = [truth.seconds(n) * random.uniform(0.95, 1.08) for n in lengths]
    fit = PrefillFit()
    for i in range(0, len(lengths), together):
        batch = slice(i, i + together)
        sample = prefill_sample([(n, 0) for n in lengths[batch]], sum(seconds[batch]))
        fit.add(sample, float(i))
    assert median(abs(fit.cost.seconds(n) / truth.seconds(n) - 1) for n in lengths) <= 0.08
