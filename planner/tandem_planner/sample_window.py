"""The latest samples of one duration, and the fit of them; computed again only when needed."""

from collections import deque
from collections.abc import Sequence
from math import isfinite
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

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self.count, self._fitted, self.updated_at = 0, 0, None
        self._coefficients = self.prior
