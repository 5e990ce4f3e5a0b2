"""What scheduling one request results in."""

from collections.abc import Sequence
from typing import Final

from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.request_load import PlacedPrompt
from .decider import PathDecision

_UNKNOWN_SIZE: Final = PlacedPrompt()


class SchedulingResult:
    """The chosen pods and the path."""

    __slots__ = (
        *("cached_tokens", "costs", "decision", "decode", "loaded_tokens", "prefill", "size"),
    )

    def __init__(  # noqa: PLR0917 - what was chosen, then what is known of it
        self,
        decision: PathDecision,
        decode: Sequence[Pod],
        prefill: Sequence[Pod] = (),
        cached_tokens: int = 0,
        costs: CostRecord | None = None,
        size: PlacedPrompt = _UNKNOWN_SIZE,
        loaded_tokens: int = 0,
    ) -> None:
        self.decision = decision
        self.decode = decode
        """The choice, then its alternates."""
        self.prefill = prefill
        """The choice, then the retries; empty without a split."""
        self.cached_tokens = cached_tokens
        """Prompt tokens believed to be cached on the decode pod."""
        self.costs = costs
        """What a choice by cost was made from; None: scorers chose."""
        self.size = size
        """What the request is predicted to take."""
        self.loaded_tokens = loaded_tokens
        """Prompt tokens that the pod that computes the prompt is expected to load from external
        storage."""
