"""Decides which rate to try next in the search for the highest rate that meets an SLO; pure.

    steps: list[SearchStep] = []
    while (rate := next_rate(steps, first=1.0, search=search)) is not None:
        steps.append(step_of(rate, measure(rate), duration=60.0, …))
    answer = highest_rate(steps, search)
    warnings = search_warnings(steps, search)

A step passes if the share of requests within the SLO (attainment) is high enough. The rate doubles
while steps pass, or halves until one does. Then the range between the highest rate that passed and
the lowest that did not is halved on a logarithmic scale, until its end is at most the share
`precision` above its start.

An invalid step, for which the load generator was too slow, says nothing of the server. It ends the
search upwards like one that fails, since a higher rate would be no better, but with a warning.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Final

from ..figures.model import Repeat, SearchStep
from .options import Search

FEWEST_SESSIONS: Final = 8
"""Sessions of a step, on average, below which its share within the SLO says nothing."""


def step_of(rate: float, repeat: Repeat, *, duration: float, sessions: int, due: int) -> SearchStep:
    """The step that sent `rate` sessions per second for `duration` seconds.

    `sessions`: number of sessions that it had; `due`: number that its arrivals asked for, more than
    a short file has.
    """
    invalid = repeat.rates.invalid and f"{repeat.rates.invalid}; use --processes"
    if sessions < due:
        invalid = (
            f"its file has {sessions} sessions, {due} were due within {duration:g} s; "
            "give a longer file or a shorter --duration"
        )
    return SearchStep(
        rate=rate,
        scheduled=repeat.all.requests / duration,
        # The last answer may come before the end of the duration.
        achieved=repeat.rates.requests * repeat.seconds / max(repeat.seconds, duration),
        attainment=repeat.rates.attainment or 0.0,
        invalid=invalid,
    )


def lowest_rate(duration: float) -> float:
    """The lowest rate, in sessions per second, that steps of `duration` seconds can judge."""
    return FEWEST_SESSIONS / duration


def next_rate(
    steps: Sequence[SearchStep], *, first: float, search: Search, lowest: float = 0.0
) -> float | None:
    """The rate to try after `steps`, not below `lowest`; None at the end of the search."""
    if not steps:
        return first
    if len(steps) >= search.most_steps:
        return None
    bound = _bound(steps, search)
    if bound is None:
        return 2 * max(step.rate for step in steps)
    passed = highest_rate(steps, search)
    if passed is None:
        return bound.rate / 2 if bound.rate / 2 >= lowest else None
    return None if _is_precise(passed, bound.rate, search) else sqrt(passed * bound.rate)


def highest_rate(steps: Sequence[SearchStep], search: Search) -> float | None:
    """The highest rate that passed below the lowest that did not; None when there is none.

    A rate that passed above a failed one passed by chance.
    """
    bound = _bound(steps, search)
    rates = [step.rate for step in steps if bound is None or step.rate < bound.rate]
    return max(rates, default=None)


def search_warnings(steps: Sequence[SearchStep], search: Search) -> list[str]:
    """Why the answer to `steps`, of which there is at least one, is not what was asked for."""
    warnings = []
    passed, bound = highest_rate(steps, search), _bound(steps, search)
    lowest, highest = (ends(step.rate for step in steps) for ends in (min, max))
    if passed is None:
        warnings.append(
            f"the search ended at {lowest:.4g} sessions/s without finding a rate that meets the"
            " SLO: the figures are those of this rate; for lower ones use a longer --duration"
        )
    if bound is None:
        warnings.append(
            f"the search ended at {highest:.4g} sessions/s without finding a rate that fails: "
            "begin with a higher --rate"
        )
    elif bound.invalid:
        warnings.append(
            "the load generator was the limit of the search, not the server: at "
            f"{bound.rate:.4g} sessions/s, {bound.invalid}"
        )
    elif passed is not None and not _is_precise(passed, bound.rate, search):
        warnings.append(
            f"the search ended after {len(steps)} steps: the highest rate is between {passed:.4g} "
            f"and {bound.rate:.4g} sessions/s"
        )
    return warnings


def _bound(steps: Sequence[SearchStep], search: Search) -> SearchStep | None:
    """The step of the lowest rate that did not pass."""
    failed = [step for step in steps if step.invalid or step.attainment < search.attainment]
    return min(failed, key=lambda step: step.rate, default=None)


def _is_precise(passed: float, bound: float, search: Search) -> bool:
    return bound <= passed * (1 + search.precision)
