"""A robust, non-negative linear fit of durations, with a prior. Pure.

    seconds ≈ θ₀ c₀ x₀ + θ₁ c₁ x₁ + …        c: the prior's coefficients, θ ≥ 0: what is fitted

First all θ are the median of measured ÷ prior seconds: a machine that is ten times slower than the
prior needs one sample. Then each θ moves as far as the samples tell it apart from the others:
iteratively reweighted least squares of the *relative* error, so that short and long durations count
alike. A sample that is far off weighs little (an outlier), and an older sample less than a newer:
by AGE_WEIGHT for each sample since, and by half for each HALF_LIFE.
RIDGE samples' worth of prior hold a θ that the samples hardly determine, for instance that of
attention's quadratic term while all prompts are short.
"""

from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import Final, NamedTuple

RIDGE: Final = 0.0003
"""Weight of the prior's shape, in samples. Too low: a coefficient that no sample determines follows
the noise, and long prompts are predicted wrongly. Too high: the shape is learned slowly."""
SPREAD: Final = 3.0
"""Distance of a θ from the others, as a multiple of them, beyond which RIDGE holds it less and
less, as a Cauchy prior does. Only samples that determine a θ move it that far: engines differ by
two orders of magnitude in how attention's term compares with the linear one."""
OUTLIER: Final = 1.0
"""Relative error from which a sample counts less, as a multiple of the median error. Higher: where
other work makes a quarter of the samples twice as slow, a fit is often 40 % too high, and even more
for short prompts. Lower: errors that are mere noise are averaged less."""
MIN_ERROR: Final = 0.05
"""Least median error: below it, differences between samples say nothing about outliers."""
AGE_WEIGHT: Final = 0.98
"""Weight of a sample as a multiple of that of the next newer one."""
HALF_LIFE: Final = 600.0
"""Seconds in which a sample loses half of its weight against one that is measured now. Too short:
quiet hours leave few samples. Too long: an engine that has become slower is believed to be fast."""
_ALIKE: Final = 0.9
"""Weights from this on count as equal: the median of equal values is faster to compute."""
_ROUNDS: Final = (1, 1, 1, 1, 1, 2, 2)
"""Exponent of an outlier's weight in each round. Gentle first: while the shape is still wrong, the
samples that would correct it look like outliers."""


class FitSample(NamedTuple):
    """One measurement."""

    features: tuple[float, ...]
    seconds: float
    at: float = 0.0
    """When, in seconds of any clock."""


def robust_fit(
    samples: Sequence[FitSample], prior: Sequence[float], ridge: float = RIDGE
) -> tuple[float, ...]:
    """Coefficients for `samples` (oldest first), each at least 0; the prior's without samples.

    Samples must have positive seconds, and `prior` positive coefficients. `ridge`: see RIDGE.
    """
    rows = [
        ([c * x for c, x in zip(prior, sample.features, strict=True)], sample.seconds, sample.at)
        for sample in samples
    ]
    rows = [row for row in rows if sum(row[0]) > 0.0]
    if not rows:
        return tuple(prior)
    newest = rows[-1][2]
    fading = [0.5 ** max(0.0, (newest - at) / HALF_LIFE) for *_, at in rows]
    scale = _weighted_median([seconds / sum(row) for row, seconds, _ in rows], fading)
    table = _Table(
        [list(column) for column in zip(*(row for row, *_ in rows), strict=True)],
        [seconds for _, seconds, _ in rows],
        [AGE_WEIGHT**age * fade for age, fade in zip(range(len(rows))[::-1], fading, strict=True)],
        fading,
        scale,
        ridge,
    )
    factors = [scale] * len(prior)
    for power in _ROUNDS if len(rows) > 1 else ():
        factors = _reweighted(table, factors, power)
    return tuple(factor * c for factor, c in zip(factors, prior, strict=True))


class _Table(NamedTuple):
    """The samples by column: sums over columns are a tenth of the time of loops over rows, and a
    fit may be computed while a request waits for its decision."""

    columns: list[list[float]]
    """Per coefficient, what the prior predicts for each sample."""
    seconds: list[float]
    ages: list[float]
    """Weights by age."""
    fading: list[float]
    """The part of them that time alone makes."""
    scale: float
    ridge: float
    """Relative to `scale`, so that it has the same meaning for fast and slow machines."""


def _reweighted(table: _Table, factors: Sequence[float], power: int) -> list[float]:
    """One round: weights by the present errors, then the weighted least squares."""
    columns, seconds, scale, ridge = table.columns, table.seconds, table.scale, table.ridge
    predictions = [0.0] * len(seconds)
    for factor, column in zip(factors, columns, strict=True):
        predictions = [p + factor * x for p, x in zip(predictions, column, strict=True)]
    if 0.0 in predictions:
        sums = map(sum, zip(*columns, strict=True))
        predictions = [p or scale * total for p, total in zip(predictions, sums, strict=True)]
    errors = [abs(s / p - 1.0) for s, p in zip(seconds, predictions, strict=True)]
    limit = OUTLIER * max(MIN_ERROR, _weighted_median(errors, table.fading))
    # Weights of squares of absolute errors: those of relative ones over the prediction's square.
    weights = [
        age * (scale / p) ** 2 * (1.0 if error <= limit else (limit / error) ** power)
        for age, p, error in zip(table.ages, predictions, errors, strict=True)
    ]
    matrix, vector = [], []
    for i, (factor, column) in enumerate(zip(factors, columns, strict=True)):
        weighted = list(map(mul, weights, column))
        hold = ridge / (1.0 + ((factor / scale - 1.0) / SPREAD) ** 2)
        matrix.append([sum(map(mul, weighted, other)) for other in columns])
        matrix[i][i] += hold
        vector.append(hold + sum(map(mul, weighted, seconds)) / scale)
    return [scale * factor for factor in _solve_non_negative(matrix, vector)]


def _weighted_median(values: list[float], weights: list[float]) -> float:
    """The value on both sides of which lies half of the weight."""
    if min(weights) > _ALIKE:
        return median(values)
    left = sum(weights) / 2
    for value, weight in sorted(zip(values, weights, strict=True)):
        left -= weight
        if left <= 0.0:
            return value
    return max(values)


def _solve_non_negative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """The solution with the most negative coefficients fixed at 0, one after the other."""
    free = list(range(len(vector)))
    while True:
        solution = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
        lowest = min(range(len(free)), key=solution.__getitem__)
        if solution[lowest] >= 0.0:
            break
        del free[lowest]
    full = [0.0] * len(vector)
    for i, value in zip(free, solution, strict=True):
        full[i] = value
    return full


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination; RIDGE on the diagonal makes the matrix positive definite."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
