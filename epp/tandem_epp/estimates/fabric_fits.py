"""What transfers to one pod take in each fabric class, learned.

A class learns from transfers of which the pair is known: those that answers report, and those that
the engine counted while all that may have been under way to the pod were of one class
(`PlacedTransfers`). The fit of all transfers, whatever their class, is the pod's `transfer`. It
stands in for a class of which nothing is known, neither here nor from alike pods. Before any
transfer is measured, each class has a rate of its own (`TRANSFERS_PRIOR`).

If only pairs that are farther apart are measured, a class is assumed to be no slower than before
anything was measured: otherwise a slow network would rule transfers within a node out untried.
"""

from collections import Counter
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_planner.transfer import (
    TRANSFER_PRIOR,
    TRANSFERS_PRIOR,
    TransferCost,
    TransferFit,
    Transfers,
)

_PRIOR: Final = tuple(TRANSFER_PRIOR)


class FabricFits:
    """One fit per fabric class, as soon as there is something to learn from."""

    def __init__(self, overall: TransferFit) -> None:
        """`overall`: the fit of all transfers of the pod."""
        self._overall = overall
        self.fits: dict[FabricClass, TransferFit] = {}

    def fit(self, fabric: FabricClass) -> TransferFit:
        """The fit of a class, to add to."""
        if (fit := self.fits.get(fabric)) is None:
            fit = self.fits[fabric] = TransferFit()
        return fit

    def is_known(self, fabric: FabricClass) -> bool:
        """Whether the class is measured, here or on alike pods."""
        fit = self.fits.get(fabric)
        return fit is not None and _is_measured(fit)

    @property
    def costs(self) -> Transfers:
        """What a transfer takes in each class."""
        if not self.fits:
            overall = self._overall.best
            is_measured = _is_measured(self._overall)
            return (overall, overall, overall) if is_measured else TRANSFERS_PRIOR
        node, domain, elsewhere = map(self._cost, FabricClass)
        return (node, domain, elsewhere)

    def _cost(self, fabric: FabricClass) -> TransferCost:
        if self.is_known(fabric):
            return self.fits[fabric].best
        overall, prior = self._overall.best, TRANSFERS_PRIOR[fabric]
        if any(self.is_known(other) for other in FabricClass if other > fabric):
            return TransferCost(*map(min, overall, prior))
        return overall if _is_measured(self._overall) else prior

    def forget(self, fabric: FabricClass) -> None:
        """Return to what is assumed without a measurement."""
        self.fits.pop(fabric, None)

    def restart(self) -> None:
        """The engine's process was replaced: start again."""
        for fit in self.fits.values():
            fit.restart()


def _is_measured(fit: TransferFit) -> bool:
    """Whether it has learned, here or on alike pods."""
    return bool(fit.count) or fit.window.prior != _PRIOR


class PlacedTransfers:
    """Which fabric classes the transfers to one pod may have had since its counters were read.

    Classes are None where it is not known. The transfers of other routers are not seen.
    """

    def __init__(self) -> None:
        self._open: Counter[FabricClass | None] = Counter()
        """Of the requests that wait for their transfer."""
        self._possible: set[FabricClass | None] = set()
        self._warm_ups, self._has_warm_up = 0, False
        """Warm-ups under way; whether there was one since the last call of `take`."""

    def begin(self, fabric: FabricClass | None) -> None:
        """A request was placed whose KV will be transferred to the pod."""
        self._open[fabric] += 1
        self._possible.add(fabric)

    def end(self, fabric: FabricClass | None) -> None:
        """The transfer of such a request is over, or will not take place."""
        self._open[fabric] -= 1

    def add(self, fabric: FabricClass | None) -> None:
        """A transfer of another class than was expected took place."""
        self._possible.add(fabric)

    def begin_warm_up(self) -> None:
        """A hand-off to the pod begins that makes the engines' handshake: its transfer takes longer
        than any later one."""
        self._warm_ups += 1
        self._has_warm_up = True

    def end_warm_up(self) -> None:
        """It is over."""
        self._warm_ups -= 1

    def take(self) -> tuple[FabricClass | None, bool]:
        """The class of all transfers since the last call (None: several, or not known), and whether
        one of them was a warm-up's."""
        [fabric, *others] = self._possible or {None}
        self._possible = {fabric for fabric, count in self._open.items() if count}
        has_warm_up, self._has_warm_up = self._has_warm_up, self._warm_ups > 0
        return None if others else fabric, has_warm_up
