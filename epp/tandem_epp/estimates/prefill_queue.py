"""The prefills under way on one pod, in the order in which they were placed.

An engine computes prompts in order. So the queue's head ends at a predicted time, and the others
wait behind it. A first token ends an entry exactly; between first tokens the clock does.
"""


class QueuedPrefill:
    """A prefill that is under way or waits."""

    __slots__ = ("has_first_token", "is_queued", "seconds")

    def __init__(self, seconds: float, has_first_token: bool) -> None:
        self.seconds = seconds
        """Predicted duration."""
        self.has_first_token = has_first_token
        """Whether its first token will be seen. An answer that is no stream passes only when it is
        complete: then the prediction alone says when the prefill is over."""
        self.is_queued = True


class PrefillQueue:
    """The prefills of one pod."""

    def __init__(self) -> None:
        # A dict keeps the order and removes from its middle at once.
        self._entries: dict[int, QueuedPrefill] = {}
        self._total = 0.0
        self._head: QueuedPrefill | None = None
        self.head_ends = 0.0
        """When the head is predicted to end; of no meaning without one."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> QueuedPrefill | None:
        """The prefill that the engine computes now; None: it is idle."""
        return self._head

    @property
    def seconds_behind_head(self) -> float:
        """Predicted seconds of the prefills that wait."""
        return max(0.0, self._total - self._head.seconds) if self._head is not None else 0.0

    def seconds_left(self, now: float) -> float:
        """Predicted seconds until all of them are over; a head that is late counts as over."""
        if self._head is None:
            return 0.0
        return self.seconds_behind_head + max(0.0, self.head_ends - now)

    def add(self, seconds: float, now: float, *, has_first_token: bool = True) -> QueuedPrefill:
        """Place a prefill of `seconds` at the end."""
        entry = QueuedPrefill(seconds, has_first_token)
        self._entries[id(entry)] = entry
        self._total += seconds
        if self._head is None:
            self._head, self.head_ends = entry, now + seconds
        return entry

    def remove(self, entry: QueuedPrefill, now: float) -> None:
        """`entry` is over; a second call does nothing."""
        if not entry.is_queued:
            return
        entry.is_queued = False
        del self._entries[id(entry)]
        self._total -= entry.seconds
        if entry is self._head:
            self._start_next(now)

    def drain(self, now: float) -> bool:
        """Remove the heads whose first token will not be seen and whose predicted end has passed;
        returns whether there were any."""
        drained = False
        while self._head is not None and not self._head.has_first_token and self.head_ends <= now:
            self.remove(self._head, self.head_ends)
            drained = True
        return drained

    def _start_next(self, now: float) -> None:
        self._head = next(iter(self._entries.values()), None)
        if self._head is None:
            # No rounding error outlives the queue.
            self._total = 0.0
        else:
            self.head_ends = now + self._head.seconds
