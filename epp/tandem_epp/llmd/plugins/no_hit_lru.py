"""no-hit-lru-scorer: prompts that no backend caches go round, so that caches grow evenly.

Formula and defaults are llm-d's (llm-d-router, no-hit-lru-scorer).
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from ...backends.pods import Pod
from ...choice.context import ChoiceContext

LRU_SIZE: Final = 1024
"""Pods whose turn is remembered; llm-d's default."""
_NEUTRAL: Final = 0.5


class NoHitLruScorer:
    """For a prompt of which some candidate has a prefix: 0.5 each. For any other, with `n`
    candidates, 1 - rank / (n - 1), at least 0: rank 0 is the first candidate that never got such a
    prompt; those that did follow, the one whose turn was longest ago first. A single candidate
    scores 1. Higher is better."""

    is_steady = False

    def __init__(self, size: int = LRU_SIZE) -> None:
        self._size = size
        self._turns: OrderedDict[str, None] = OrderedDict()
        """Names of the pods that were given a prompt which no pod had cached, the latest last."""

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        is_cold = not any(context.placed_tokens(pod) for pod in pods)
        context.notes[self] = is_cold
        if not is_cold:
            return [_NEUTRAL] * len(pods)
        if len(pods) == 1:
            return [1.0]
        turn = {name: i for i, name in enumerate(self._turns)}
        new = {pod.name: i for i, pod in enumerate(p for p in pods if p.name not in turn)}
        ranks = (new[p.name] if p.name in new else len(new) + turn[p.name] for p in pods)
        return [max(0.0, 1.0 - rank / (len(pods) - 1)) for rank in ranks]

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        """A request is placed on these pods: unless its prompt was cached, they now come last."""
        if not context.notes.get(self):
            return
        for pod in (decode, prefill):
            if pod is not None:
                self._turns[pod.name] = None
                self._turns.move_to_end(pod.name)
        while len(self._turns) > self._size:
            self._turns.popitem(last=False)
