"""The latest samples of one duration, and the fit of them; computed again only when needed."""

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, sqrt
from operator import mul
from typing import Final

from .linear_fit import RIDGE, FitSample, robust_fit

WINDOW: Final = 64
"""Samples kept. More: steadier and slower to follow a change of the engine."""
_REFIT: Final = 4
"""A fit is computed again once this part (1 / _REFIT) of the samples in the window is new."""
_LEAST_SECONDS: Final = 0.25
"""A full window is fitted at most this often, by the times of its samples. A fit takes 0.5 ms: a
pod that answers 1,000 requests per second would otherwise cost 3 % of a core. Longer: predictions
follow an engine that changes its speed later."""
_REFIT_SECONDS: Final = 10.0
"""A fit is computed again with the first sample that is this much newer than the last fit."""


def is_usable(features: tuple[float, ...], seconds: float) -> bool:
    """Whether a fit can learn from a measurement: positive seconds, and nothing infinite or NaN,
    which would spoil the coefficients for as long as the window has the sample."""
    return seconds > 0.0 and all(map(isfinite, (seconds, *features)))


_INDEPENDENT: Final = 16
"""Samples that count for how exact a fit is, at most. More: consecutive samples share what makes
the machine slower for a while, so a fit would seem more exact than it is."""
_ERROR_PRIOR: Final = 0.2
_ERROR_PRIOR_SAMPLES: Final = 4.0
"""Relative error of samples before any is known, and its weight, in samples. Too low: a pod with
one or two samples seems to differ from others by whatever these happen to be."""
_DEVIATIONS: Final = 3.1
"""Two standard errors of a fit, as a multiple of the samples' mean absolute error: 2 × 1.25 for the
mean of normally distributed errors, and 1.25 times that for their median, which a fit is close to
in which errors above the median count less."""


class SampleWindow:
    """Samples of one duration and their coefficients."""

    def __init__(self, prior: tuple[float, ...], ridge: float = RIDGE) -> None:
        """`ridge`: weight of the prior's shape, in samples."""
        self.prior = prior
        """Coefficients until the first sample, and the shape of those that samples leave open."""
        self.count = 0
        """Samples ever added."""
        self.updated_at: float | None = None
        """Time of the latest sample; None without one."""
        self._ridge = ridge
        self._samples: deque[FitSample] = deque(maxlen=WINDOW)
        self._coefficients = prior
        self._fitted = 0
        """`count` at the latest fit."""
        self._fitted_at = 0.0
        """`updated_at` at the latest fit."""
        self.typical: tuple[float, ...] = prior
        """The mean features of the samples; of no meaning without one."""
        self.tolerance = 1.0
        """By how much, as a share of the fit at `typical`, the truth may differ from it: two
        standard errors, by how far the samples are from the fit."""

    def add(self, features: tuple[float, ...], seconds: float, now: float) -> None:
        """Add a measurement, unless it is not usable."""
        if not is_usable(features, seconds):
            return
        self._samples.append(FitSample(features, seconds, now))
        self.count += 1
        self.updated_at = now

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The fit of the samples in the window; the prior without samples."""
        new, updated_at = self.count - self._fitted, self.updated_at or 0.0
        if not new:
            return self._coefficients
        waited = updated_at - self._fitted_at
        is_many = new * _REFIT >= min(self.count, WINDOW)
        is_due = waited >= _LEAST_SECONDS or self.count <= WINDOW
        if (is_many and is_due) or waited >= _REFIT_SECONDS:
            self._fit()
        return self._coefficients

    @property
    def samples(self) -> Sequence[FitSample]:
        """The samples in the window, the oldest first."""
        return tuple(self._samples)

    def set_prior(self, prior: tuple[float, ...]) -> None:
        """Start from other coefficients, for instance those of an alike pod."""
        self.prior = prior
        self._fit()

    def _fit(self) -> None:
        self._coefficients = robust_fit(self._samples, self.prior, self._ridge)
        self._fitted, self._fitted_at = self.count, self.updated_at or 0.0
        if self._samples:
            self._assess()

    def _assess(self) -> None:
        """How exact the fit is."""
        samples, number = self._samples, len(self._samples)
        columns = zip(*(sample.features for sample in samples), strict=True)
        self.typical = tuple(sum(column) / number for column in columns)
        # An outlier counts once: what it took says nothing about the others.
        errors = (
            min(1.0, abs(sample.seconds / predicted - 1.0)) if predicted > 0.0 else 1.0
            for sample in samples
            for predicted in [sum(map(mul, self._coefficients, sample.features))]
        )
        error = (sum(errors) + _ERROR_PRIOR * _ERROR_PRIOR_SAMPLES) / (
            number + _ERROR_PRIOR_SAMPLES
        )
        self.tolerance = _DEVIATIONS * error / sqrt(min(number, _INDEPENDENT))

    def difference(self, coefficients: Sequence[float], others: Sequence[float]) -> float:
        """How far apart both are at what is typical for the samples, as a share of the first."""
        seconds = sum(map(mul, coefficients, self.typical))
        return abs(sum(map(mul, others, self.typical)) / seconds - 1.0) if seconds else inf

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self.count, self._fitted, self.updated_at = 0, 0, None
        self._coefficients = self.prior
