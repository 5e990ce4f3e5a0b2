"""The cost of one phase on one engine, learned from its latest samples."""

from collections.abc import Callable, Iterable
from math import hypot
from typing import Final, Generic, TypeVar

from .linear_fit import RIDGE
from .sample_window import SampleWindow

_SAME: Final = 0.01
"""Change of what alike engines share, as a share of it, below which an engine keeps what it has:
each change costs the next decision some microseconds."""
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
        self.shared: CostT | None = None
        """The cost of alike engines, of which the samples do not tell this one apart; None: they
        do, or nothing is known of others. Two engines with unequal errors would not share the
        work."""

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

    @property
    def best(self) -> CostT:
        """What to expect: `shared`, else `cost`."""
        return self.cost if self.shared is None else self.shared

    @property
    def is_cold(self) -> bool:
        """Whether what it knows is of the engine's start, and will not come again."""
        return False

    def share(self, other: "LearnedCost[CostT] | None") -> bool:
        """Expect what `other` knows, the most typical of alike engines, unless the samples tell
        both apart; None: there is none. Returns whether `best` has another value now."""
        before, own = self.shared, self.cost
        if other is None or not self.count or (other is not self and self._is_told_apart(other)):
            self.shared = None
        elif before is None or self.window.difference(before, other.cost) > _SAME:
            self.shared = other.cost
        return (self.shared or own) != (before or own)

    def _is_told_apart(self, other: "LearnedCost[CostT]") -> bool:
        difference = self.window.difference(self.cost, other.cost)
        return not self.is_cold and difference > hypot(
            self.window.tolerance, other.window.tolerance
        )

    def set_prior(self, prior: CostT) -> None:
        """Start from another engine's coefficients."""
        self.window.set_prior(tuple(prior))

    def restart(self) -> None:
        """The engine's process was replaced: start again."""
        self.window.clear()
        self.shared = None
