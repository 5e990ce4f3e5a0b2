"""What a router without KV events takes each pod to cache: the prompts that it sent there."""

from collections import OrderedDict
from collections.abc import Sequence

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.work import Work


class PlacedPrefixes:
    """Blocks of placed prompts by pod; beyond `capacity` blocks of a pod, the least recently used
    are forgotten."""

    def __init__(self, pods: int, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(pods)]
        """Block → when it was placed last, the least recent first."""

    def add(self, pod: int, blocks: Sequence[int], now: float) -> None:
        """A prompt is placed."""
        known = self._blocks[pod]
        # The end of a prompt is forgotten before its start, as engines evict.
        for block in reversed(blocks):
            known[block] = now
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def tokens(self, pod: int, work: Work, since: float = float("-inf")) -> int:
        """Tokens at the start of the prompt that were placed on the pod, at `since` or later."""
        known, count = self._blocks[pod], 0
        for block in work.blocks:
            if known.get(block, float("-inf")) < since or block not in known:
                break
            count += 1
        return min(count * BLOCK, work.prompt_tokens)

    def last_used(self, pod: int, work: Work) -> float:
        """When the prompt's first block was placed on the pod; -inf: never."""
        return self._blocks[pod].get(work.blocks[0], float("-inf"))
