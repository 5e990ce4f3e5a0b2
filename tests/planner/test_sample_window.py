"""The window keeps the latest samples and follows them."""

from math import inf, nan

import pytest

from tandem_planner.sample_window import WINDOW, SampleWindow


def test_the_prior_stands_until_the_first_sample() -> None:
    window = SampleWindow((0.01, 1e-4))
    assert (window.coefficients, window.count, window.updated_at) == ((0.01, 1e-4), 0, None)
    window.add((1.0, 100.0), 0.04, 7.0)
    assert (window.count, window.updated_at) == (1, 7.0)
    assert window.coefficients == pytest.approx((0.02, 2e-4))


def test_old_samples_leave() -> None:
    window = SampleWindow((0.01, 1e-4))
    for i in range(3 * WINDOW):
        seconds = 0.02 if i < 2 * WINDOW else 0.2
        window.add((1.0, 100.0), seconds, float(i))
    fixed, slope = window.coefficients
    assert fixed + 100 * slope == pytest.approx(0.2)


def test_another_prior_scales_what_was_measured() -> None:
    window = SampleWindow((0.01, 1e-4))
    window.add((1.0, 100.0), 0.04, 0.0)
    window.set_prior((1e-9, 1e-3))
    fixed, slope = window.coefficients
    assert fixed + 100 * slope == pytest.approx(0.04)
    assert fixed < 1e-6


def test_after_clear_the_prior_stands() -> None:
    window = SampleWindow((0.01, 1e-4))
    window.add((1.0, 100.0), 0.04, 0.0)
    window.clear()
    assert (window.coefficients, window.count, window.updated_at) == ((0.01, 1e-4), 0, None)


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(100.0, nan), (100.0, inf), (100.0, 0.0), (100.0, -1.0), (nan, 0.1)]
)
def test_what_is_no_measurement_is_not_learned(tokens: float, seconds: float) -> None:
    window = SampleWindow((0.01, 1e-4))
    window.add((1.0, tokens), seconds, 0.0)
    assert (window.coefficients, window.count, window.updated_at) == ((0.01, 1e-4), 0, None)
    window.add((1.0, 100.0), 0.04, 0.0)
    assert window.coefficients == pytest.approx((0.02, 2e-4))


def test_a_sample_after_a_pause_is_learned_at_once() -> None:
    window = SampleWindow((0.01, 1e-4))
    for i in range(WINDOW):
        window.add((1.0, 100.0), 0.02, i * 0.1)
    assert sum(window.coefficients) > 0
    window.add((1.0, 100.0), 0.2, 20_000.0)
    fixed, slope = window.coefficients
    assert fixed + 100 * slope == pytest.approx(0.2, rel=0.01)


def test_the_tolerance_shrinks_with_samples_and_grows_with_their_scatter() -> None:
    def tolerance(count: int, scatter: float) -> float:
        window = SampleWindow((0.01, 1e-4))
        for i in range(count):
            window.add((1.0, 100.0), 0.02 * (1 + scatter * (-1) ** i), float(i))
        assert sum(window.coefficients) > 0
        return window.tolerance

    assert tolerance(1, 0.0) > tolerance(4, 0.0) > tolerance(16, 0.0) > tolerance(64, 0.0) > 0
    assert tolerance(64, 0.02) < 0.06
    assert tolerance(64, 0.4) > 0.15


def test_costs_are_compared_at_what_is_typical() -> None:
    window = SampleWindow((0.01, 1e-4))
    window.add((1.0, 100.0), 0.02, 0.0)
    assert sum(window.coefficients) > 0
    assert window.difference((0.01, 1e-4), (0.01, 2e-4)) == pytest.approx(0.5)
    assert window.difference((0.0, 0.0), (0.01, 1e-4)) == inf
