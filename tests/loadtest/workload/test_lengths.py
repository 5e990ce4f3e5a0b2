"""Length distributions: means, bounds and scaling."""

import random
from math import exp, log
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.workload.presets import Bimodal, Lengths, LogNormal

MANY = 20_000


def draws(lengths: Lengths, count: int = MANY) -> list[int]:
    generator = random.Random(5)
    return [lengths.draw(generator) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.0, 0.3, 0.9])
def test_lognormal_lengths_have_their_mean_median_and_spread(spread: float) -> None:
    sample = draws(LogNormal(1000, spread))
    assert fmean(sample) == pytest.approx(1000, rel=0.03)
    assert median(sample) == pytest.approx(1000 * exp(-(spread**2) / 2), rel=0.03)
    assert stdev(log(tokens) for tokens in sample) == pytest.approx(spread, rel=0.03)


@given(st.floats(1, 1e5), st.floats(0, 3), st.integers())
def test_lognormal_lengths_stay_within_their_bounds(mean: float, spread: float, seed: int) -> None:
    generator = random.Random(seed)
    lengths = LogNormal(mean, spread)
    assert all(1 <= lengths.draw(generator) <= round(8 * mean) for _ in range(20))


def test_bimodal_lengths_are_short_or_long_in_their_shares() -> None:
    sample = draws(Bimodal(share=0.25))
    short = [tokens for tokens in sample if 50 <= tokens <= 200]
    long = [tokens for tokens in sample if 2000 <= tokens <= 4000]
    assert len(short) + len(long) == MANY
    assert len(long) / MANY == pytest.approx(0.25, abs=0.01)
    assert fmean(sample) == pytest.approx(Bimodal(share=0.25).mean, rel=0.03)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_bimodal_shares_of_none_and_all(share: float) -> None:
    assert {tokens >= 2000 for tokens in draws(Bimodal(share), 200)} == {bool(share)}


@pytest.mark.parametrize("lengths", [LogNormal(300, 0.5), Bimodal(share=0.1)])
def test_scaled_lengths_have_the_new_mean_and_the_same_shape(lengths: Lengths) -> None:
    scaled = lengths.scaled(3000)
    assert scaled.mean == pytest.approx(3000)
    factor = 3000 / lengths.mean
    assert draws(scaled) == pytest.approx([t * factor for t in draws(lengths)], abs=factor)
