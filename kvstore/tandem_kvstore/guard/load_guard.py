"""Whether a request loads KV, computes it or does both at once, and for how long it may wait.

Predicted seconds, for m chunks that may be stored and t tokens after them, in g layer groups; what
the engine has of the first chunk already is loaded with it and counts in no C:

    COMPUTE   C(m) + C(t)
    LOAD      L(m) + C(t)                                       at most 0.85 of the deadline
    LAYERS    L(m)/g + max(L(m) - L(m)/g, C(t))                 likewise
    BOTH      max(C(k), L(m - k)) + C(t), with the best k       computes k chunks, loads the others

C and L are the seconds to compute and to load, as the guard has learned them. The deadline of a
load that computing waits for is half of C(m). BOTH needs none while computing goes on: it takes
about 1 / (1/C + 1/L). When computing has come to the first loaded chunk, it waits until twice the
predicted L(m - k) have passed, and for no more than half of what it would take to compute these
chunks. So no request waits longer than half of the predicted time to compute what it waits for,
whatever the store does. A store that seems too slow is tried with BOTH, for half of the chunks: at
first with every request, since a new engine's first loads are slow, and then from time to time.

Computing from the front while the rear is loaded is described in Jin et al., "Compute Or Load KV
Cache? Why Not Both?" (Cake), 2024.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ..errors import Reason
from .breaker import Breaker, BreakerSettings
from .rates import TwoTermFit

DEADLINE_SHARE: Final = 0.5
"""Longest wait for KV, as a share of the predicted time to compute it."""
_HEADROOM: Final = 0.85
"""Share of the deadline that a predicted load may fill: predictions are medians."""
_LATE: Final = 2.0
"""Multiple of its predicted time for which computing waits for a rear. Less: a load that takes a
little longer than usual is given up, and was for nothing."""
RETRY: Final = 10.0
"""Seconds after which a store that was too slow is tried again, by one request."""
_FIRST: Final = 8
"""Loads after which the fit is believed, where a trial is with BOTH. Fewer: the slow first ones,
which open connections, keep an engine from a fast store. More: more requests try a slow one."""
_BOTH_GAIN: Final = 0.2
"""Least share of the time that doing both at once must be predicted to save over loading or
computing alone. Less: engines compute tokens that they could load a little later, and other
requests wait for these steps."""
_OVERLAP_GAIN: Final = 0.05
"""Least share of the time that loading layer by layer must be predicted to save. Less: a load that
its deadline ends, of which an overlapped one keeps little, costs more than that."""
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


class Way(Enum):
    """How the KV of stored chunks gets into an engine's blocks; see the module."""

    COMPUTE = auto()
    LOAD = auto()
    """Load the chunks, then compute the tokens after them."""
    LAYERS = auto()
    """Load layer group by layer group, and compute the tokens after the chunks meanwhile."""
    BOTH = auto()
    """Load the rear of the chunks while the front is computed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Chunks of a prompt that may be stored."""

    chunks: int
    chunk_tokens: int
    chunk_bytes: int
    context: int
    """Tokens before them that are cached."""
    cached: int = 0
    """Tokens of the first of them that are cached: loading saves no computing of these."""
    groups: int = 1
    """Layer groups of a chunk; 1 also where no step may wait for a layer."""
    tail: int = 0
    """Tokens after them."""
    can_do_both: bool = False
    """Whether the engine can compute the front while the rear is loaded. If not, and if not all
    chunks can be loaded in time, a load is of as many leading chunks as can."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does."""

    chunks: int
    """Leading chunks that are loaded, or with BOTH also computed; 0: compute all."""
    deadline: float
    """Seconds for look-up and load together; with BOTH, those after which computing does not wait
    for the load."""
    reason: Reason | None = None
    """Why nothing is loaded."""
    way: Way = Way.LOAD
    front: int = 0
    """With BOTH, leading chunks that are computed."""
    patience: float = 0.0
    """With BOTH, most seconds that computing waits for the load."""


class LoadGuard:
    """Cost model and circuit breaker of one store, as seen from one engine."""

    def __init__(self, settings: BreakerSettings | None = None, retry: float = RETRY) -> None:
        """`retry`: see RETRY."""
        self.breaker = Breaker(settings)
        self._retry = retry
        self.loading = TwoTermFit(_LATENCY, _SECONDS_PER_BYTE)
        self.computing = TwoTermFit(_SECONDS_PER_TOKEN, _SECONDS_PER_PAIR)
        self._last_load = 0.0
        # Loads that have ended, also of those that the fit has forgotten.
        self._ended = 0
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
        self._observe(size, seconds, now)

    def observe_slow_load(self, size: int, seconds: float, now: float) -> None:
        """Learn from a load that its deadline ended: `size` bytes came in all that time."""
        self._is_retry = False
        # At least this slow; without a byte, the delay alone is known.
        self._observe(size, seconds, now)

    def decide(self, hit: Hit, now: float) -> Decision:
        """What a request does about chunks that may be stored."""
        if not self.breaker.allows:
            return _compute(Reason.BREAKER_OPEN)
        deadline = DEADLINE_SHARE * self._compute_chunks(hit, hit.chunks)
        if deadline < _LEAST_DEADLINE:
            return _compute(Reason.UNPROFITABLE)
        size = hit.chunks * hit.chunk_bytes
        is_half = hit.can_do_both and hit.chunks > 1
        # With few measurements, and after a while without any, a load tells how fast the store is.
        is_known = self._ended >= (_FIRST if is_half else 1)
        is_due = not is_known or now - self._last_load > self._retry
        is_trial = is_due or size >= _FAR * self._largest
        if hit.can_do_both:
            decision = self._best(hit, deadline)
            # What pays needs no trial. Of an unknown store, the prior tells.
            is_trial = is_trial and not decision.chunks
        else:
            decision = self._loadable_prefix(hit, deadline)
        if not is_trial:
            return decision
        self._largest = max(self._largest, size)
        self._last_load, self._is_retry = now, is_due or self._is_retry
        if is_half:
            return self._both(hit, hit.chunks // 2, deadline / DEADLINE_SHARE)
        return Decision(hit.chunks, deadline)

    def decide_hand_off(self, hit: Hit, limit: float) -> Decision:
        """For chunks that another engine has just stored for this request, to be loaded within
        `limit` seconds whatever the cost model predicts."""
        if not self.breaker.allows:
            return _compute(Reason.BREAKER_OPEN)
        seconds = self._load_chunks(hit, hit.chunks)
        way = Way.LAYERS if self._layers_pay(hit, seconds) else Way.LOAD
        return Decision(hit.chunks, limit, way=way)

    def split(self, hit: Hit, least: int = 0) -> tuple[int, float]:
        """The number of leading chunks, `least` or more, to compute while the others are loaded, so
        that both end soonest, and the predicted seconds of both together."""

        def seconds(front: int) -> float:
            compute = self._compute_chunks(hit, front)
            return max(compute, self._load_chunks(hit, hit.chunks - front))

        # The more are computed, the fewer are loaded: the best is where one overtakes the other.
        crossing = bisect_left(
            range(hit.chunks),
            True,
            key=lambda k: self._compute_chunks(hit, k) >= self._load_chunks(hit, hit.chunks - k),
        )
        front = min((max(crossing - 1, least), max(crossing, least)), key=seconds)
        return front, seconds(front)

    def is_load_sooner(self, tokens: int, context: int, size: int) -> bool:
        """Whether `size` bytes are loaded before `tokens` after `context` are computed."""
        return self.loading.predict(1, size) < self.compute_seconds(tokens, context)

    def _observe(self, size: int, seconds: float, now: float) -> None:
        self.loading.observe(1, size, seconds)
        self._ended += 1
        self._last_load = now

    def _best(self, hit: Hit, deadline: float) -> Decision:
        """The predicted best for an engine that can do both at once."""
        load, compute = self._load_chunks(hit, hit.chunks), self._compute_chunks(hit, hit.chunks)
        is_in_time = load <= _HEADROOM * deadline
        alone = load if is_in_time else compute
        # Where loading all would be best but may end too late, the first chunk is computed.
        front, both = self.split(hit, least=0 if is_in_time else 1)
        is_both = 0 < front < hit.chunks and both <= (1 - _BOTH_GAIN) * alone
        if is_in_time and self._layers_pay(hit, both if is_both else alone):
            return Decision(hit.chunks, deadline, way=Way.LAYERS)
        if is_both:
            return self._both(hit, front, _LATE * self._load_chunks(hit, hit.chunks - front))
        return Decision(hit.chunks, deadline) if is_in_time else _compute(Reason.UNPROFITABLE)

    def _both(self, hit: Hit, front: int, late: float) -> Decision:
        """Compute `front` chunks and load the others, and wait for these for `late` seconds."""
        compute = self._compute_chunks(hit, hit.chunks) - self._compute_chunks(hit, front)
        patience = DEADLINE_SHARE * compute
        return Decision(hit.chunks, late, way=Way.BOTH, front=front, patience=patience)

    def _layers_pay(self, hit: Hit, other: float) -> bool:
        """Whether loading layer by layer beats another way, which takes `other` seconds and then
        those of the tokens after the chunks."""
        if hit.groups < 2 or not self.loading.samples:
            return False
        load = self._load_chunks(hit, hit.chunks)
        tail = self.compute_seconds(hit.tail, hit.context + hit.chunks * hit.chunk_tokens)
        layered = load / hit.groups + max(load - load / hit.groups, tail)
        return layered <= (1 - _OVERLAP_GAIN) * (other + tail)

    def _loadable_prefix(self, hit: Hit, deadline: float) -> Decision:
        """As many leading chunks as are predicted to come in time, if that beats computing."""
        left = _HEADROOM * deadline - self.loading.a
        per_chunk = self.loading.b * hit.chunk_bytes
        count = min(hit.chunks, int(left / per_chunk)) if per_chunk > 0 else hit.chunks
        if left <= 0 or count == 0:
            return _compute(Reason.UNPROFITABLE)
        if self._load_chunks(hit, count) >= self._compute_chunks(hit, count):
            return _compute(Reason.UNPROFITABLE)
        return Decision(count, deadline)

    def _compute_chunks(self, hit: Hit, chunks: int) -> float:
        tokens = max(0, chunks * hit.chunk_tokens - hit.cached)
        return self.compute_seconds(tokens, hit.context + hit.cached)

    def _load_chunks(self, hit: Hit, chunks: int) -> float:
        return self.loading.predict(1, chunks * hit.chunk_bytes) if chunks else 0.0


def _compute(reason: Reason) -> Decision:
    return Decision(0, 0.0, reason, Way.COMPUTE)


def _pairs(tokens: int, context: int) -> float:
    """Pairs of a token and one that it attends to."""
    return tokens * (context + (tokens + 1) / 2)
