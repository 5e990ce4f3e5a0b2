"""The saturation from which on requests of a priority wait: llm-d's usage limit policies. Pure.

Source: llm-d/llm-d-router, pkg/epp/framework/plugins/flowcontrol/usagelimits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_TICK: Final = 0.01
"""Seconds of a turn of `SoftCeilings`."""
_ALMOST: Final = 1e-9
"""Keeps a saturation just below 1 from a division by 0."""


class Ceilings(Protocol):
    """A usage limit policy."""

    def limits(self, saturation: float, priorities: Sequence[int], now: float) -> Sequence[float]:
        """For each of `priorities`, the highest first: its requests wait while the saturation is
        this or higher. `now`: seconds of any clock."""


@dataclass(frozen=True)
class StaticCeilings:
    """static-usage-limit-policy: the same for all."""

    threshold: float = 1.0

    def limits(self, _saturation: float, priorities: Sequence[int], _now: float) -> list[float]:
        return [self.threshold] * len(priorities)


@dataclass(frozen=True)
class HoldbackCeilings:
    """priority-holdback-policy: from `highest` for the first priority down to `lowest` for the last
    one, by their rank, or in proportion to their values."""

    lowest: float
    highest: float = 1.0
    is_by_value: bool = False

    def limits(self, _saturation: float, priorities: Sequence[int], _now: float) -> list[float]:
        if len(priorities) < 2:
            return [self.highest] * len(priorities)
        spread, last = self.highest - self.lowest, len(priorities) - 1
        if self.is_by_value:
            most, least = priorities[0], priorities[-1]
            shares = [(priority - least) / (most - least) for priority in priorities]
        else:
            shares = [1.0 - rank / last for rank in range(last + 1)]
        return [self.lowest + share * spread for share in shares]


@dataclass(frozen=True)
class SoftCeilings:
    """soft-reflective-ceiling-policy: of `n` priorities, number `i` (0: the highest) waits from the
    saturation 1 - i · saturation ÷ (n - 1) on, but for one turn in round(s ÷ (1 - s)).

    llm-d counts looks at its queues for turns; here they are `_TICK` long, so that the share of
    time is the same however often the pods are looked at.
    """

    def limits(self, saturation: float, priorities: Sequence[int], now: float) -> list[float]:
        last = len(priorities) - 1
        ceilings = [1.0] * len(priorities)
        is_open = False
        if 0.5 <= saturation < 1.0:
            period = max(1, round(saturation / (1.0 - saturation + _ALMOST)))
            is_open = int(now / _TICK) % period == 0
        for rank in range(1, last + 1):
            is_reached = saturation >= 1.0 - rank * saturation / last
            if is_reached and not is_open:
                ceilings[rank] = 0.0
        return ceilings
