"""How many requests an engine computes at once, learned from its queue: no engine reports it.

A request that waits although no prompt is before it waits for a place among those that run
(`max_num_seqs`), or for KV. What runs then is the most. The limit grows again while all that is
sent runs: by one at first, since the limit was seen, and by twice as many each time, since it may
have been KV that is free by now.
"""

from math import inf


class EngineSlots:
    """The slots of one engine."""

    def __init__(self) -> None:
        self.limit = inf
        """Requests; infinite until some waited."""
        self._step = 1.0

    def on_scrape(self, running: float, waiting: float, queued: float, known: float) -> None:
        """The engine reports so many requests. `queued` prompts are known to wait or to be
        computed, and `known` requests to be there at all."""
        if waiting >= queued + 1.0:
            self.limit, self._step = max(1.0, running), 1.0
        elif not waiting and max(running, known) >= self.limit:
            self.limit = max(self.limit, running) + self._step
            self._step *= 2.0

    def restart(self) -> None:
        """Another process answers."""
        self.limit, self._step = inf, 1.0
