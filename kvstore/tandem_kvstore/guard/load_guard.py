"""Whether a request loads KV or computes it, and for how long it may try.

Loading is worth it if it takes less time than computing the same tokens. A load may take half of
the predicted time to compute all of them, so a request never takes longer than computing plus half
of it, whatever the store does. If not all chunks can be loaded in that time, as many are loaded as
can: the rest is computed.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from ..errors import Reason
from .breaker import Breaker, BreakerSettings
from .rates import TwoTermFit

DEADLINE_SHARE: Final = 0.5
"""Deadline of a load as a share of the predicted time to compute the same tokens."""
_HEADROOM: Final = 0.85
"""Share of the deadline that a predicted load may fill: predictions are medians."""
RETRY: Final = 10.0
"""Seconds after which a store that was too slow is tried again, by one request."""
_OVERLAP_GAIN: Final = 0.05
"""Least share of loading and computing that overlapping them must be predicted to save. Less: a
load that its deadline ends, of which an overlapped one keeps little, costs more than that."""
_RECOVERED: Final = 0.5
"""Share of the predicted time below which a load that was tried again shows that the store has
become faster. More: noise counts as a change. Less: such a store stays unused for minutes."""
_FAR: Final = 4
"""Bytes of a load over those of the largest one tried from which the fit says little: it is tried.
Less: more loads from slow stores. More: a store's delay, which short loads show, is taken for its
rate longer."""
_LATENCY: Final = 0.005
_SECONDS_PER_BYTE: Final = 1 / 500e6
"""Prior of a store: 5 ms and 500 MB/s, until loads were measured."""
_SECONDS_PER_TOKEN: Final = 1e-3
_SECONDS_PER_PAIR: Final = 1e-8
"""Prior of computing: 1,000 tokens a second, until prompts were computed."""
_LEAST_DEADLINE: Final = 0.002
"""Seconds: shorter deadlines end before the event loop has run once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does."""

    chunks: int
    """Leading chunks to load; 0: compute all."""
    deadline: float
    """Seconds for look-up and load together."""
    reason: Reason | None = None
    """Why nothing is loaded."""


class LoadGuard:
    """Cost model and circuit breaker of one store, as seen from one engine."""

    def __init__(self, settings: BreakerSettings | None = None, retry: float = RETRY) -> None:
        """`retry`: see RETRY."""
        self.breaker = Breaker(settings)
        self._retry = retry
        self.loading = TwoTermFit(_LATENCY, _SECONDS_PER_BYTE)
        self.computing = TwoTermFit(_SECONDS_PER_TOKEN, _SECONDS_PER_PAIR)
        self._last_load = 0.0
        # Bytes of the largest load that was tried.
        self._largest = 0
        # Whether the next load to end was started to try a slow store again.
        self._is_retry = False

    def compute_seconds(self, tokens: int, context: int) -> float:
        """Predicted seconds to compute `tokens` after `context` tokens that are cached."""
        return self.computing.predict(tokens, _pairs(tokens, context))

    def observe_compute(self, tokens: int, context: int, seconds: float) -> None:
        """Learn from a chunk of a prompt that was computed."""
        self.computing.observe(tokens, _pairs(tokens, context), seconds)

    def observe_load(self, size: int, seconds: float, now: float) -> None:
        """Learn from a load that succeeded."""
        self._largest = max(self._largest, size)
        # At one load every `retry` seconds, the slow ones would outweigh it for minutes.
        if self._is_retry and seconds < _RECOVERED * self.loading.predict(1, size):
            self.loading.forget()
        self._is_retry = False
        self.loading.observe(1, size, seconds)
        self._last_load = now

    def observe_slow_load(self, size: int, seconds: float, now: float) -> None:
        """Learn from a load that its deadline ended: `size` bytes came in all that time."""
        self._is_retry = False
        # At least this slow; without a byte, the delay alone is known.
        self.loading.observe(1, size, seconds)
        self._last_load = now

    def decide(
        self, chunks: int, chunk_tokens: int, chunk_bytes: int, context: int, now: float
    ) -> Decision:
        """For `chunks` chunks that may be stored, after `context` tokens that are cached."""
        if not self.breaker.allows:
            return Decision(0, 0.0, Reason.BREAKER_OPEN)
        deadline = DEADLINE_SHARE * self.compute_seconds(chunks * chunk_tokens, context)
        if deadline < _LEAST_DEADLINE:
            return Decision(0, 0.0, Reason.UNPROFITABLE)
        size = chunks * chunk_bytes
        # Without measurements, and after a while without any, one load tells how fast the store is.
        is_due = not self.loading.samples or now - self._last_load > self._retry
        if is_due or size >= _FAR * self._largest:
            self._largest = max(self._largest, size)
            self._last_load, self._is_retry = now, is_due or self._is_retry
            return Decision(chunks, deadline)
        count = self._loadable(chunks, chunk_bytes, deadline)
        if count == 0 or self._load_seconds(count, chunk_bytes) >= self.compute_seconds(
            count * chunk_tokens, context
        ):
            return Decision(0, 0.0, Reason.UNPROFITABLE)
        return Decision(count, deadline)

    def overlap_pays(self, size: int, groups: int, tokens: int, context: int) -> bool:
        """Whether to compute `tokens` after `context` while `size` bytes in `groups` layer groups
        are loaded: layer by layer, from the moment at which the first group is here."""
        if groups < 2 or not self.loading.samples:
            return False
        load = self.loading.predict(1, size)
        compute = self.compute_seconds(tokens, context)
        return (1 - 1 / groups) * min(load, compute) >= _OVERLAP_GAIN * (load + compute)

    def _loadable(self, chunks: int, chunk_bytes: int, deadline: float) -> int:
        """Chunks that are predicted to be loaded within the deadline."""
        left = _HEADROOM * deadline - self.loading.a
        if left <= 0:
            return 0
        per_chunk = self.loading.b * chunk_bytes
        return min(chunks, int(left / per_chunk)) if per_chunk > 0 else chunks

    def _load_seconds(self, chunks: int, chunk_bytes: int) -> float:
        return self.loading.predict(1, chunks * chunk_bytes)


def _pairs(tokens: int, context: int) -> float:
    """Pairs of a token and one that it attends to."""
    return tokens * (context + (tokens + 1) / 2)


class MissingKeys:
    """Keys that the store did not have a moment ago: a bounded cache of misses."""

    def __init__(self, capacity: int = 65_536, seconds: float = 5.0) -> None:
        """`seconds`: a miss is believed for so long. Longer: chunks that another engine has stored
        meanwhile are computed again. Shorter: more look-ups."""
        self._capacity, self._seconds = capacity, seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: str, now: float) -> None:
        """The store does not have `key`."""
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > self._capacity:
            self._until.popitem(last=False)

    def discard(self, key: str) -> None:
        """The store has `key` now."""
        self._until.pop(key, None)

    def has(self, key: str, now: float) -> bool:
        """Whether the store is known not to have `key`."""
        return self._until.get(key, 0.0) > now
