"""How what the EPP has learned is judged: a wrong estimate fails, on a disturbed machine too."""

from collections.abc import Sequence

import pytest

from tandem_contract.pod_reports import Estimate, Source

from .learning import Learned

LENGTHS = (200, 1000, 2000, 3500)


def seconds(length: int) -> float:
    """What the engine takes when nothing disturbs it."""
    return 0.005 + 1e-4 * length


def learned(factor: float, noise: Sequence[float], slowdown: float = 1.0) -> Learned:
    """An estimate of `factor` times what the requests took, which was `slowdown` times the truth.
    Times are disturbed by the factors `noise`, one after the other."""
    figures = {
        "seconds_per_request": 0.005 * factor * slowdown,
        "seconds_per_token": 1e-4 * factor * slowdown,
        "seconds_per_pair": 0.0,
    }
    estimate = Estimate(Source.LEARNED, 50, 1.0, figures)
    requests = [(n, seconds(n) * slowdown * each) for n in LENGTHS for each in noise]
    measured = {n: [seconds(n) * each for each in noise] for n in LENGTHS}
    return Learned(estimate, requests, measured, reports=0)


QUIET = (0.99, 1.0, 1.01, 1.0, 0.99, 1.01)
LOUD = (0.6, 0.8, 1.0, 1.0, 1.4, 1.9)


@pytest.mark.parametrize("noise", [QUIET, LOUD])
def test_a_right_estimate_passes(noise: Sequence[float]) -> None:
    learned(1.05, noise).check()


def test_an_estimate_of_slower_requests_passes() -> None:
    learned(1.0, QUIET, slowdown=1.5).check()


@pytest.mark.parametrize(
    ("factor", "slowdown"),
    # 0.75 times what requests took at 1.5 times the truth is nearly the truth: no such case.
    [(0.5, 1.0), (0.75, 1.0), (1.3, 1.0), (2.0, 1.0), (0.5, 1.5), (1.3, 1.5), (2.0, 1.5)],
)
def test_a_wrong_estimate_fails(factor: float, slowdown: float) -> None:
    with pytest.raises(AssertionError):
        learned(factor, QUIET, slowdown).check()


@pytest.mark.parametrize("factor", [0.4, 2.0])
def test_a_very_wrong_estimate_fails_on_a_disturbed_machine(factor: float) -> None:
    with pytest.raises(AssertionError):
        learned(factor, LOUD).check()
