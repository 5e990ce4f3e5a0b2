"""ITL as a function of the decodes that run."""

from random import Random

import pytest

from tandem_planner.decode_fit import DECODE_PRIOR, DecodeCost, DecodeFit


def test_step_and_slope_are_learned() -> None:
    fit, random = DecodeFit(), Random(1)
    for _ in range(60):
        decodes = random.randint(1, 200)
        fit.add(decodes, (0.02 + 3e-4 * decodes) * random.uniform(0.9, 1.1), 5.0)
    for decodes in (50, 100, 200):
        itl = fit.cost.step + fit.cost.slope * decodes
        assert itl == pytest.approx(0.02 + 3e-4 * decodes, rel=0.15)
    assert fit.cost.slope == pytest.approx(3e-4, rel=0.3)
    assert (fit.count, fit.updated_at) == (60, 5.0)


def test_no_decode_says_nothing() -> None:
    fit = DecodeFit()
    fit.add(0, 0.01, 0.0)
    fit.add(3, 0.0, 0.0)
    assert (fit.cost, fit.count) == (DECODE_PRIOR, 0)


def test_a_restart_and_another_engines_figures() -> None:
    fit = DecodeFit()
    fit.add(1, 1.0, 0.0)
    fit.restart()
    assert fit.cost == DECODE_PRIOR
    fit.set_prior(DecodeCost(0.5, 0.1))
    assert fit.cost == DecodeCost(0.5, 0.1)
