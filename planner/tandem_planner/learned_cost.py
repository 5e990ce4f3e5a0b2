"""The cost of one phase on one engine, learned from its latest samples."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from .linear_fit import RIDGE
from .sample_window import SampleWindow

CostT = TypeVar("CostT", bound=tuple[float, ...])


class LearnedCost(Generic[CostT]):
    """A window of samples whose coefficients are a `CostT`; a phase's class adds what a sample
    is."""

    def __init__(
        self, make: Callable[[Iterable[float]], CostT], prior: CostT, ridge: float = RIDGE
    ) -> None:
        """`make`: a CostT of its coefficients; `prior` holds until the first sample; `ridge`:
        weight of the prior's shape, in samples."""
        self._make = make
        self.window = SampleWindow(tuple(prior), ridge)
        """Its samples."""
        self._coefficients, self._cost = self.window.coefficients, prior
        """Those of the window when `cost` was last read, and the same as a CostT."""

    @property
    def count(self) -> int:
        """Samples."""
        return self.window.count

    @property
    def updated_at(self) -> float | None:
        """Time of the latest sample; None without one."""
        return self.window.updated_at

    @property
    def cost(self) -> CostT:
        """The coefficients; the prior's without samples."""
        if self._coefficients is not (coefficients := self.window.coefficients):
            self._coefficients, self._cost = coefficients, self._make(coefficients)
        return self._cost

    def set_prior(self, prior: CostT) -> None:
        """Start from another engine's coefficients."""
        self.window.set_prior(tuple(prior))

    def restart(self) -> None:
        """The engine's process was replaced: start again."""
        self.window.clear()
