"""How long one step of an engine takes: the formula that simulation, search and rooflines share.

A step computes one token for each of `decodes` running answers, which read `context` tokens of KV
together, and `tokens` prompt tokens, each of which looks at all before it. These looks are counted
as in `prefill_fit`: `pairs` = n² + 2 n cached, summed over the chunks of the step.

    LinearStep   α + β decodes + γ context + b tokens + c pairs     measured, or learned
    roofline     the same work on a GPU that was not measured         `roofline.RooflineStep`
"""

from typing import NamedTuple, Protocol

from .decode_fit import DecodeCost
from .prefill_fit import PrefillCost


class StepCost(Protocol):
    """Seconds of steps on one engine."""

    def seconds(
        self, decodes: float, context: float, tokens: float = 0.0, pairs: float = 0.0
    ) -> float:
        """Seconds of one step."""


class LinearStep(NamedTuple):
    """A step whose parts add up: the coefficients of one engine, in seconds."""

    fixed: float
    """α: a step without work: launches, and reading the weights."""
    per_decode: float
    """β: each decode."""
    per_context: float
    """γ: each KV token that the decodes read."""
    per_token: float
    """b: each prompt token."""
    per_pair: float
    """c: each unit of n² + 2 n cached."""

    def seconds(
        self, decodes: float, context: float, tokens: float = 0.0, pairs: float = 0.0
    ) -> float:
        """Seconds of one step."""
        return (
            self.fixed + self.per_decode * decodes + self.per_context * context
            + self.per_token * tokens + self.per_pair * pairs
        )  # fmt: skip

    def times(self, factor: float) -> "LinearStep":
        """The coefficients of an engine that is `factor` times as fast at everything."""
        return LinearStep._make(value / factor for value in self)


def pairs(start: int, end: int) -> float:
    """n² + 2 n cached of the prompt's tokens from `start` to `end`."""
    return float(end - start) * (start + end)


def prompt_seconds(step: StepCost, start: int, end: int, budget: int) -> float:
    """Seconds to compute a prompt's tokens from `start` to `end` in steps of at most `budget`
    tokens, while nothing else runs."""
    return sum(
        step.seconds(0, 0, chunk - at, pairs(at, chunk))
        for at in range(start, end, budget)
        for chunk in (min(at + budget, end),)
    )


def prefill_cost(step: StepCost, longest: int, budget: int) -> PrefillCost:
    """What `prefill_fit` would learn of prompts up to `longest` tokens: the a, b and c that agree
    with the step's seconds at a quarter, half and all of `longest`."""
    lengths = [max(1, longest // 4), max(2, longest // 2), max(3, longest)]
    (n, x), (m, y), (k, z) = ((n, prompt_seconds(step, 0, n, budget)) for n in lengths)
    # Newton's divided differences of the quadratic through three points.
    first, second = (y - x) / (m - n), (z - y) / (k - m)
    per_pair = (second - first) / (k - n)
    per_token = first - per_pair * (n + m)
    return PrefillCost(x - per_token * n - per_pair * n * n, per_token, per_pair)


def decode_cost(step: StepCost, decodes: int, context: float) -> DecodeCost:
    """What `decode_fit` would learn of up to `decodes` answers with `context` KV tokens each: its
    slope has β and γ × context in one."""
    alone, together = step.seconds(1, context), step.seconds(decodes, decodes * context)
    slope = (together - alone) / max(1, decodes - 1)
    return DecodeCost(alone - slope, slope)
