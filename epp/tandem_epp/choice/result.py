"""What choosing pods for one request results in."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tandem_contract.paths import RoutingPath

from ..backends.pods import Pod
from ..estimates.cost_record import CostRecord
from ..estimates.request_load import PlacedPrompt

MAX_UNSPLIT_BLOCKS: Final = 2
"""KV blocks at the prompt's end that may be missing from the cache. The last block is partial, and
the one before it holds the start of the answer or a closing bracket of the JSON."""
_UNKNOWN_SIZE: Final = PlacedPrompt()


class NoBackend(Exception):
    """No pod may serve the request now; it may be retried."""


class SplitImpossible(Exception):
    """The choice wants a split, no prefill backend is healthy, and the configuration does not
    allow the fallback to one engine."""


class PathDecision(NamedTuple):
    """The routing path and its reason."""

    path: RoutingPath
    reason: str
    """One word of a fixed set: a metric label."""


class SchedulingResult:
    """The chosen pods and the path."""

    __slots__ = (
        "alternate",
        "cached_tokens",
        "costs",
        "decision",
        "decode",
        "loaded_tokens",
        "prefill",
        "size",
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
        alternate: Pod | None = None,
    ) -> None:
        self.decision = decision
        self.decode = decode
        """The choice, then its alternates, all of which the destination header names."""
        self.alternate = alternate
        """The pod that Tandem's Envoy asks when the choice takes nothing; None: no other pod, or
        `decode` has alternates."""
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
