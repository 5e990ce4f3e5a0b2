"""What KV comes over from other pods: one transfer after the other, at the pod that receives it."""

from tandem_planner.kv_size import KvSize
from tandem_planner.transfer import TransferCost

from .work import Work


class Link:
    """The receiving end of one pod."""

    def __init__(self, cost: TransferCost, size: KvSize, *, streamed: float = 0.0) -> None:
        """`size`: bytes of a prompt's KV; `streamed`: the share of it that moves while the prompt
        is computed, layer by layer (0: all of it moves afterwards)."""
        self.cost, self.size, self.streamed = cost, size, streamed
        self.busy = 0.0
        """Seconds of all transfers."""
        self.bytes = 0.0
        """Of all transfers."""
        self._free_at = 0.0

    def receive(self, work: Work, tokens: int, now: float) -> float:
        """When the KV of `tokens` tokens of a prompt is here, which asks for it `now`."""
        size = self.size.bytes(tokens)
        seconds = self.cost.seconds(size)
        # What streams moves within the prefill, and is late by as much as it takes longer.
        ahead = min(seconds * self.streamed, work.prefill_seconds)
        self._free_at = max(now, self._free_at) + seconds - ahead
        self.busy += seconds
        self.bytes += size
        return self._free_at
