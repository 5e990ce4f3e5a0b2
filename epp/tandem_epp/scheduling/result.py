"""What scheduling one request results in."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.request_load import PlacedPrompt
from .decider import PathDecision

_UNKNOWN_SIZE: Final = PlacedPrompt()


class SchedulingResult(NamedTuple):
    """The chosen pods and the path."""

    decision: PathDecision
    decode: Sequence[Pod]
    """The choice, then its alternates."""
    prefill: Sequence[Pod] = ()
    """The choice, then the retries; empty without a split."""
    cached_tokens: int = 0
    """Prompt tokens believed to be cached on the decode pod."""
    costs: CostRecord | None = None
    """What a choice by cost was made from; None: scorers chose."""
    size: PlacedPrompt = _UNKNOWN_SIZE
    """What the request is predicted to take."""
