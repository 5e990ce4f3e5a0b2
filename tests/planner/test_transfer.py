"""Transfer rate and KV bytes per token, learned from transfers."""

from random import Random

import pytest

from tandem_planner.transfer import TRANSFER_PRIOR, TransferCost, TransferFit


def test_latency_and_rate_are_learned() -> None:
    fit, random = TransferFit(), Random(1)
    truth = TransferCost(0.02, 1e-9)
    for _ in range(60):
        count = random.uniform(1e6, 1e9)
        fit.add(1, count, truth.seconds(count) * random.uniform(0.9, 1.1), 3.0)
    for count in (1e7, 1e8, 1e9):
        assert fit.cost.seconds(count) == pytest.approx(truth.seconds(count), rel=0.15)
    assert (fit.count, fit.updated_at) == (60, 3.0)


def test_bytes_per_token_are_an_average() -> None:
    fit = TransferFit()
    assert fit.bytes_per_token is None
    fit.add_size(100, 1000)
    assert fit.bytes_per_token == 10
    for _ in range(100):
        fit.add_size(100, 2000)
    assert fit.bytes_per_token == pytest.approx(20, rel=0.01)
    fit.add_size(0, 5)
    fit.add_size(5, 0)
    assert fit.bytes_per_token == pytest.approx(20, rel=0.01)


def test_nothing_transferred_says_nothing() -> None:
    fit = TransferFit()
    fit.add(1, 0, 1.0, 0.0)
    fit.add(1, 5, 0.0, 0.0)
    assert (fit.cost, fit.count) == (TRANSFER_PRIOR, 0)
    assert fit.cost.seconds(0) == 0.0


def test_a_restart_and_another_engines_figures() -> None:
    fit = TransferFit()
    fit.add(1, 1e6, 10.0, 0.0)
    fit.add_size(1, 1)
    fit.restart()
    assert (fit.cost, fit.bytes_per_token) == (TRANSFER_PRIOR, None)
    fit.set_prior(TransferCost(1.0, 1.0))
    assert fit.cost == TransferCost(1.0, 1.0)
