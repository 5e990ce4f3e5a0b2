"""Start times of sessions: `start_times(arrivals, seed=7, duration=60)`. Pure."""

import random
from collections.abc import Iterator
from itertools import count
from math import inf, sqrt

from .settings import PROCESSES, Arrivals, WorkloadError


def start_times(
    arrivals: Arrivals, *, seed: int, duration: float | None = None
) -> Iterator[float | None]:
    """Seconds after the start of the run at which sessions start, in order and without end.

    The same arguments give the same times in every process. With λ = `rate`:

        constant   t_i = i / λ
        poisson    gaps are exponential with mean 1/λ
        gamma      gaps are gamma distributed with shape k = `burstiness` and mean 1/λ, so their
                   coefficient of variation is 1/√k; k = 1 is Poisson
        ramp       a Poisson process whose rate goes linearly from λ to λ' = `rate_end` at T =
                   `duration`, and stays at λ' afterwards
        closed     None: a session starts when another has ended

    The ramp inverts the cumulative rate Λ(t) = λt + (λ' − λ)t²/2T: with S_i the times of a Poisson
    process of rate 1, the times are t_i = Λ⁻¹(S_i) (Çınlar, "Introduction to Stochastic Processes",
    1975, chapter 4: time change of a Poisson process). In a stable form,

        t = 2s / (λ + √(λ² + 2s(λ' − λ)/T))

    Random gaps precede each start, the first one too; `constant` starts at 0. A trace has times of
    its own (`traces`).

    Raises WorkloadError when the process is unknown or lacks a setting.
    """
    if arrivals.process == "closed":
        return _closed()
    if arrivals.process == "trace":
        raise WorkloadError("arrivals `trace` need a trace as the workload")
    if arrivals.process not in PROCESSES:
        raise WorkloadError(f"arrivals {arrivals.process!r}: write one of {', '.join(PROCESSES)}")
    rate = _above_zero(arrivals.rate, f"arrivals `{arrivals.process}` need a rate")
    if arrivals.process == "constant":
        return (i / rate for i in count())
    # Its own generator: what sessions say does not depend on how they arrive.
    return _random_times(arrivals, rate, duration, random.Random(f"{seed}/arrivals"))


def _random_times(
    arrivals: Arrivals, rate: float, duration: float | None, generator: random.Random
) -> Iterator[float]:
    match arrivals.process:
        case "gamma":
            return _gamma(generator, rate, _above_zero(arrivals.burstiness, "gamma needs a shape"))
        case "ramp":
            rate_end = _above_zero(arrivals.rate_end, "arrivals `ramp` need a rate at the end")
            duration = _above_zero(duration, "arrivals `ramp` need a duration")
            return _ramp(generator, rate, rate_end, duration)
    return _poisson(generator, rate)


def _above_zero(value: float | None, what: str) -> float:
    if value is None or not 0 < value < inf:
        raise WorkloadError(f"{what} above 0, not {value}")
    return value


def _closed() -> Iterator[None]:
    while True:
        yield None


def _poisson(generator: random.Random, rate: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += generator.expovariate(rate)
        yield at


def _gamma(generator: random.Random, rate: float, shape: float) -> Iterator[float]:
    scale = 1 / (shape * rate)  # the mean of a gamma distribution is shape × scale
    at = 0.0
    while True:
        at += generator.gammavariate(shape, scale)
        yield at


def _ramp(
    generator: random.Random, rate: float, rate_end: float, duration: float
) -> Iterator[float]:
    slope = (rate_end - rate) / duration
    at_end = (rate + rate_end) / 2 * duration
    for unit in _poisson(generator, 1.0):
        if unit < at_end:
            # Rounding may take the square of a rate near 0 below 0.
            yield 2 * unit / (rate + sqrt(max(0.0, rate * rate + 2 * unit * slope)))
        else:
            yield duration + (unit - at_end) / rate_end
