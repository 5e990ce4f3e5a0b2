"""Scorers that compare a request with the labels of pods.

Formulas and defaults are llm-d's (llm-d-router, header-label-affinity-scorer and
context-length-aware).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...backends.pods import Pod
from ...choice.context import ChoiceContext
from .filters import label
from .profile import keep_if

_RANGE: Final = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")
_NO_LABEL: Final = 0.5
"""Score of a pod for any length."""
_BEST_OUTSIDE: Final = 0.3
"""Scores of pods whose range the prompt is outside of are at most this, the others above it."""


@dataclass(frozen=True)
class HeaderLabelScorer:
    """1 for a pod whose label `key` has the value of the request header `header`, else 0; 0 each
    without the header."""

    header: str
    key: str
    is_steady = False

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        value = context.headers.get(self.header)
        return [1.0 if value and label(pod, self.key) == value else 0.0 for pod in pods]


@dataclass(frozen=True)
class ContextLengthScorer:
    """How well the prompt's length fits the range `min-max` in the pod's label `key`; higher is
    better. 0.5 without the label, 0 for one that is no range. In the range, with width = max - min:

        0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (max - length) / width)

    and 1 for a width of 0. Outside: 0.3 / (1 + tokens to the range / 1000)."""

    key: str
    is_steady = False

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        length = _length(context)
        return [_range_score(label(pod, self.key), length) for pod in pods]


@dataclass(frozen=True)
class ContextLengthFilter:
    """Keeps pods whose range, in the label `key`, the prompt's length is in, and those without the
    label."""

    key: str
    is_steady = False

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        length = _length(context)
        return keep_if(pods, lambda pod: _is_within(label(pod, self.key), length))


def _length(context: ChoiceContext) -> int:
    return context.request.prompt_tokens if context.request else 0


def _range(text: str) -> tuple[int, int] | None:
    """The bounds in `text`; None if it is no range."""
    if (match := _RANGE.fullmatch(text)) is None:
        return None
    low, high = int(match[1]), int(match[2])
    return (low, high) if low <= high else None


def _is_within(text: str | None, length: int) -> bool:
    if text is None:
        return True
    bounds = _range(text)
    return bounds is not None and bounds[0] <= length <= bounds[1]


def _range_score(text: str | None, length: int) -> float:
    if text is None:
        return _NO_LABEL
    if (bounds := _range(text)) is None:
        return 0.0
    low, high = bounds
    if not low <= length <= high:
        return _BEST_OUTSIDE / (1.0 + max(low - length, length - high) / 1000.0)
    if low == high:
        return 1.0
    narrow = 1.0 / (1.0 + (high - low) / 10_000.0)
    fit = 0.7 * narrow + 0.3 * (high - length) / (high - low)
    return _BEST_OUTSIDE + (1.0 - _BEST_OUTSIDE) * fit
