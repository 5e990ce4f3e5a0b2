"""What the requests of a model are to meet, and how the cost weighs it. Pure.

Where a model has objectives, `cost` has two harms more, both of them in seconds of latency that a
miss is worth: 1 / √(1 - attainment) times the TTFT.

    miss    × the share of requests with this predicted first token that come later than the TTFT
    stall   × prefill × Σ 1 / tokens ÷ ITL × `pressure`, the sum over the answers of the pod: one
            whose mean ITL grows by all of its objective counts as one that misses its TTFT, if the
            pod is not much faster than the objective asks

An answer whose first token came too late counts LOST_SHARE in all of `stall`. So a request that can
meet its objectives goes where the fewest misses follow, of its own and of others, and among such
pods where latencies are least. One that misses them everywhere has nothing to gain and goes where
it harms least: to answers that missed theirs as well. While all pods are fast, no objective changes
a choice.
"""

from math import inf, sqrt
from typing import Final, NamedTuple

ITL_WEIGHT: Final = 40.0
"""Seconds of a first token that one second of an answer's mean ITL is worth where no objective says
it: a reader who waits 2 s for the first token waits 50 ms for each other one."""
SPREAD: Final = 0.3
"""By which share of the TTFT first tokens come earlier or later than predicted. Lower: a pod that
is just in time is taken for a safe one. Higher: a pod with an empty queue is preferred to one that
has the prompt cached and would be in time."""
LOST_SHARE: Final = 0.1
"""Weight of an answer whose first token came too late. 0: nothing bounds its ITL. Higher: answers
that can still meet both are delayed beside it."""
FAST: Final = 0.3
SLOW: Final = 0.7
"""Predicted ITL of a pod, as shares of the objective, up to which no answer and from which each
answer may miss it by a prefill more. Higher: the first misses come before anything is done against
them. Lower: prompts leave their caches although no answer would have missed."""
MAX_WEIGHT: Final = 10.0
"""1 / √(1 - attainment) from an attainment of 0.99 on. Higher: of latency nothing is weighed any
more."""


class Objective(NamedTuple):
    """What is weighed of one model's objectives."""

    ttft: float
    """Seconds; inf: any."""
    itl: float
    """Seconds; inf: any."""
    miss: float
    """Seconds of latency that one request more which meets its objectives is worth."""
    stall: float
    """Such seconds per second that the mean ITL of an answer grows where it may miss, beside
    ITL_WEIGHT."""


def make_objective(ttft: float | None, itl: float | None, attainment: float) -> Objective:
    """The objective of TTFT and ITL in seconds, of which one is not None, and the share of requests
    that is to meet both."""
    # The fewer requests may miss it, the more latency is one of them worth.
    weight = 1.0 / sqrt(max(1.0 - attainment, 1.0 / MAX_WEIGHT**2))
    # Without a TTFT, that which the default weighs as the ITL.
    miss = weight * (ttft if ttft is not None else ITL_WEIGHT * (itl or 0.0))
    stall = 0.0 if itl is None else max(0.0, miss / itl - ITL_WEIGHT)
    return Objective(
        ttft if ttft is not None else inf, itl if itl is not None else inf, miss, stall
    )


NO_OBJECTIVE: Final = Objective(ttft=inf, itl=inf, miss=0.0, stall=0.0)
"""Of models without one: latencies count alone."""


def in_time(ttft: float) -> float:
    """The longest prediction, in seconds, with which all first tokens come within `ttft`."""
    return ttft * (1.0 - SPREAD)


def too_late(ttft: float) -> float:
    """The shortest prediction with which none does."""
    return ttft * (1.0 + SPREAD)


def missed(first_token: float, ttft: float) -> float:
    """Share of the requests whose first token is predicted in `first_token` seconds for which it
    comes later than in `ttft` seconds: 0 to 1, and linear between."""
    if first_token <= in_time(ttft):
        return 0.0
    return min(1.0, (first_token - in_time(ttft)) / (too_late(ttft) - in_time(ttft)))


def answer_weight(first_token: float, objective: Objective) -> float:
    """Weight of an answer whose first token is predicted in, or came after, `first_token` seconds:
    LOST_SHARE if it is too late, else 1."""
    return 1.0 - (1.0 - LOST_SHARE) * missed(first_token, objective.ttft)


def pressure(load: float) -> float:
    """Share of a pod's answers that may miss their ITL by a prefill more, where the predicted ITL
    is `load` times the objective: 0 to 1, and linear between."""
    return min(1.0, max(0.0, (load - FAST) / (SLOW - FAST)))
