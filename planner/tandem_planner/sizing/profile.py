"""The steps of one engine, fitted to what a client measured of it: `tandem profile`. Pure.

    TTFT of a prompt of n tokens alone     r + α + b n + c n²
    gap of B answers with context C each   α + β B + γ B C

r is what a request takes beside its steps: the way to the server and back. The prompts are computed
in one step each, or in steps whose α is small beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tandem_planner.linear_fit import FitSample, robust_fit
from tandem_planner.prefill_fit import PREFILL_PRIOR
from tandem_planner.step_cost import LinearStep

_DECODE_PRIOR: Final = (0.01, 1e-4, 1e-8)
_BEYOND: Final = 1.25
"""How far beyond what was measured the fit is believed."""


class PrefillPoint(NamedTuple):
    """A prompt alone on the engine."""

    tokens: int
    seconds: float
    """Until its first token."""


class DecodePoint(NamedTuple):
    """Alike answers together on the engine."""

    decodes: int
    context: float
    """Tokens of KV of each, on average."""
    seconds: float
    """Between two tokens."""


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """What points say of an engine."""

    step: LinearStep
    request: float
    """Seconds of a request beside its steps."""
    longest_prompt: int
    """Tokens, of the points."""
    most_decodes: int

    def unknown(self, longest_prompt: int) -> str | None:
        """Why nothing is known of a workload with prompts of so many tokens; None: it is."""
        if longest_prompt <= _BEYOND * self.longest_prompt:
            return None
        return (
            f"unknown: the workload has prompts of {longest_prompt:,} tokens, and the profile none "
            f"above {self.longest_prompt:,}: measure with --longest {longest_prompt}"
        )


def fitted(prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint]) -> FittedEngine:
    """Fit the points, at least one of each. Raises ValueError without."""
    if not prefills or not decodes:
        raise ValueError("a profile needs a prefill and a decode at least")
    fixed, per_token, per_pair = robust_fit(
        [FitSample((1.0, p.tokens, float(p.tokens) ** 2), p.seconds) for p in prefills],
        PREFILL_PRIOR,
    )
    alpha, per_decode, per_context = robust_fit(
        [FitSample((1.0, d.decodes, d.decodes * d.context), d.seconds) for d in decodes],
        _DECODE_PRIOR,
    )
    return FittedEngine(
        LinearStep(alpha, per_decode, per_context, per_token, per_pair),
        max(0.0, fixed - alpha),
        max(point.tokens for point in prefills),
        max(point.decodes for point in decodes),
    )
