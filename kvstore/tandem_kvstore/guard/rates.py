"""Learns durations as a sum of two terms.

    seconds ≈ a x + b y        a, b ≥ 0

For loads x is 1 and y the bytes: a is the store's delay, b the inverse of its bandwidth. For
computing x is the number of tokens and y the pairs of attention: its quadratic term.

The fit is weighted least squares of the *relative* error, so that short and long durations count
alike; older samples weigh less. Until samples of different sizes tell the two terms apart, a prior
gives their ratio.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

_SAMPLES: Final = 64
_AGE: Final = 0.95
"""Weight of a sample, as a multiple of the weight of the next newer one."""
_RIDGE: Final = 0.01
"""Weight of the prior's ratio, in samples."""
_OUTLIER: Final = 3.0
"""A sample that is longer or shorter than predicted by more than this factor weighs less: one stall
must not make a store look slow."""


@dataclass(frozen=True, slots=True)
class _Sample:
    x: float
    y: float
    seconds: float


class TwoTermFit:
    """The learned a and b. Each sample recomputes them, from at most 64 samples."""

    def __init__(self, a: float, b: float) -> None:
        """`a` and `b`: the prior, positive."""
        self._prior = (a, b)
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self.a, self.b = a, b

    @property
    def samples(self) -> int:
        """Number of samples in the fit."""
        return len(self._samples)

    def predict(self, x: float, y: float) -> float:
        """Seconds."""
        return self.a * x + self.b * y

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from one duration; those that are not positive are ignored."""
        if seconds > 0 and x + y > 0:
            self._samples.append(_Sample(x, y, seconds))
            self._fit()

    def forget(self) -> None:
        """Drop all samples, because what they measured has changed. `a` and `b` stay until the next
        sample."""
        self._samples.clear()

    def _fit(self) -> None:
        (a0, b0), samples = self._prior, self._samples
        # Samples without y tell nothing about b: they must not scale its prior.
        ratios = [(s.seconds / (a0 * s.x + b0 * s.y), s.y) for s in samples]
        with_y = [ratio for ratio, y in ratios if y]
        # In multiples of the scaled prior both unknowns are about 1, so one ridge suits both.
        u = a0 * median(ratio for ratio, _ in ratios)
        v = b0 * (median(with_y) if with_y else 1.0)
        ta = tb = 1.0
        for _ in range(4):
            ta, tb = self._solve(u, v, ta, tb)
        self.a, self.b = ta * u, tb * v

    def _solve(self, u: float, v: float, ta: float, tb: float) -> tuple[float, float]:
        xx, xy, yy, xs, ys = _RIDGE, 0.0, _RIDGE, _RIDGE, _RIDGE
        for age, s in enumerate(reversed(self._samples)):
            predicted = ta * u * s.x + tb * v * s.y
            ratio = s.seconds / predicted if predicted > 0 else 1.0
            weight = _AGE**age
            if (far := max(ratio, 1 / ratio)) > _OUTLIER:
                weight *= (_OUTLIER / far) ** 2
            x, y = u * s.x / s.seconds, v * s.y / s.seconds
            xx, xy, yy = xx + weight * x * x, xy + weight * x * y, yy + weight * y * y
            xs, ys = xs + weight * x, ys + weight * y
        det = xx * yy - xy * xy
        ta, tb = (xs * yy - ys * xy) / det, (ys * xx - xs * xy) / det
        # A negative term is fixed at 0, and the other one is fitted alone.
        if ta < 0:
            return 0.0, ys / yy
        if tb < 0:
            return xs / xx, 0.0
        return ta, tb
