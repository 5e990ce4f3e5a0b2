"""How much each further decode slows the others down on one engine, learned from measurements.

    seconds between two tokens of one request (ITL) = step + slope × decodes running

`step` is an empty step (launches, reading the weights), `slope` the attention and sampling of one
more request in the batch.
"""

from typing import Final, NamedTuple

from .learned_cost import LearnedCost


class DecodeCost(NamedTuple):
    """The coefficients of one engine, in seconds."""

    step: float
    """ITL of a request alone."""
    slope: float
    """ITL added by each further decode."""


DECODE_PRIOR: Final = DecodeCost(0.01, 1e-4)
"""Assumed before anything is measured: 100 tokens per second for a request alone, and half of that
in a batch of 100."""


_RIDGE: Final = 5.0
"""Weight of the prior's shape, in samples. ITL varies more with the prefills between the steps than
with the decodes: a slope from a few samples would be noise."""


class DecodeFit(LearnedCost[DecodeCost]):
    """The fit of one engine."""

    def __init__(self, prior: DecodeCost = DECODE_PRIOR) -> None:
        super().__init__(DecodeCost._make, prior, _RIDGE)

    def add(self, decodes: float, itl: float, now: float) -> None:
        """Learn that requests got a token every `itl` seconds while `decodes` ran."""
        if decodes > 0:
            self.window.add((1.0, decodes), itl, now)
