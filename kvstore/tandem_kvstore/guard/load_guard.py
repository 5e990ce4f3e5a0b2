"""Whether a request loads KV, computes it or does both at once, and for how long it may wait.

The guard learns C, the seconds to compute tokens, and L, the seconds of a load. It predicts the
seconds of each way, for m chunks that may be stored, t tokens after them and g layer groups:

    COMPUTE   C(m) + C(t)
    LOAD      L(m) + C(t)                                 L(m): at most 0.85 of the deadline
    LAYERS    L(m)/g + max(L(m) - L(m)/g, C(t))           L(m): at most 0.85 of the deadline
    BOTH      max(C(k), L(m - k)) + C(t), best k          computes k chunks, loads the others

Tokens of the first chunk that the engine has already are loaded with it, but not counted in C.

No request waits longer than half of the predicted time to compute what it waits for, whatever the
store does. For LOAD and LAYERS this is the deadline: half of C(m). BOTH takes about
1 / (1/C + 1/L) and has no deadline while it computes. When it has computed all chunks before the
loaded ones, it waits until twice the predicted L(m - k) has passed, but at most half of what these
chunks would take to compute.

A store that seems too slow is tried again with BOTH, for half of the chunks: by the first loads of
a new engine, because those that open connections are slow, and later by one request every RETRY
seconds.

Computing the front while the rear is loaded: Jin et al., "Compute Or Load KV Cache? Why Not Both?"
(Cake), 2024.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from ..errors import Reason
from .breaker import Breaker, BreakerSettings
from .rates import TwoTermFit

DEADLINE_SHARE: Final = 0.5
"""Longest wait for KV, as a share of the predicted time to compute it. More: requests lose more
time to a slow store. Less: fewer loads end in time."""
_HEADROOM: Final = 0.85
"""Largest share of the deadline that a predicted load may fill, because some loads take longer."""
_REAR_WAIT: Final = 2.0
"""Multiple of a rear's predicted time until which computing waits for it. Less: loads that take a
little longer than usual are in vain."""
RETRY: Final = 10.0
"""Seconds after which one request tries a store again that was too slow."""
_TRIALS: Final = 8
"""First loads of an engine that are tried whatever is predicted, with BOTH. Fewer: the first loads,
slow because they open connections, keep the engine from a fast store. More: more requests try a
slow one."""
_BOTH_GAIN: Final = 0.2
"""Least share of the time that BOTH must save over loading or computing alone, as predicted. Less:
engines compute tokens that they could load a little later, and other requests wait for these
steps."""
_OVERLAP_GAIN: Final = 0.05
"""Least share of the time that LAYERS must save, as predicted. Less: the gain does not make up for
loads that their deadline ends, of which LAYERS keeps few whole chunks."""
_RECOVERY: Final = 0.5
"""A retry that takes less than this share of the predicted time shows that the store has become
faster. More: noise counts as a change. Less: such a store stays unused for minutes."""
_LARGER: Final = 4
"""A load with at least this multiple of the bytes of any load before is tried: the fit knows little
about it. Less: more loads from slow stores. More: the fit takes a long delay for a low rate until a
larger load is tried."""
_LATENCY: Final = 0.005
_SECONDS_PER_BYTE: Final = 1 / 500e6
"""Prior of a store until loads were measured: 5 ms and 500 MB/s."""
_SECONDS_PER_TOKEN: Final = 1e-3
_SECONDS_PER_PAIR: Final = 1e-8
"""Prior of computing until prompts were measured: 1,000 tokens a second."""
_LEAST_DEADLINE: Final = 0.002
"""Shortest deadline in seconds: a shorter one ends before the event loop has run once."""


class Way(Enum):
    """How a request gets the KV of stored chunks; see the module."""

    COMPUTE = auto()
    LOAD = auto()
    """Load the chunks, then compute the tokens after them."""
    LAYERS = auto()
    """Load layer group by layer group, and compute the tokens after the chunks meanwhile."""
    BOTH = auto()
    """Load the rear of the chunks while the front is computed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Chunks of a prompt that may be stored, and what surrounds them."""

    chunks: int
    chunk_tokens: int
    chunk_bytes: int
    context: int
    """Cached tokens before the chunks."""
    cached: int = 0
    """Cached tokens of the first chunk: loading them saves no computing."""
    groups: int = 1
    """Layer groups of a chunk. 1: LAYERS is not possible."""
    tail: int = 0
    """Tokens after the chunks."""
    can_do_both: bool = False
    """Whether the engine can compute the front while the rear is loaded (BOTH). If it cannot, it
    loads as many leading chunks as are predicted to come in time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does with the chunks of a `Hit`."""

    chunks: int
    """Leading chunks to load, with BOTH to load or compute; 0: compute all."""
    deadline: float
    """Seconds for look-up and load together. With BOTH, computing waits for the load until so many
    seconds after the load began."""
    reason: Reason | None = None
    """Why nothing is loaded."""
    way: Way = Way.LOAD
    front: int = 0
    """With BOTH, leading chunks to compute."""
    max_wait: float = 0.0
    """With BOTH, most seconds that computing waits for the load after it computed the front."""


class LoadGuard:
    """Cost model and circuit breaker of one store, as seen from one engine."""

    def __init__(self, settings: BreakerSettings | None = None, retry: float = RETRY) -> None:
        """`retry`: see RETRY."""
        self.breaker = Breaker(settings)
        self._retry = retry
        self.loading = TwoTermFit(_LATENCY, _SECONDS_PER_BYTE)
        self.computing = TwoTermFit(_SECONDS_PER_TOKEN, _SECONDS_PER_PAIR)
        self._last_load = 0.0
        # Number of loads that have ended, including those that the fit has forgotten.
        self._ended = 0
        # Bytes of the largest load that was tried.
        self._largest = 0
        # Whether a load was started to try a slow store again, and has not ended.
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
        # The samples of the slow store would outweigh one load every `retry` seconds for minutes.
        if self._is_retry and seconds < _RECOVERY * self.loading.predict(1, size):
            self.loading.forget()
        self._is_retry = False
        self._observe(size, seconds, now)

    def observe_slow_load(self, size: int, seconds: float, now: float) -> None:
        """Learn from a load that ended at its deadline: only `size` bytes came in `seconds`."""
        self._is_retry = False
        # Without a byte the sample tells only the delay: it is at least `seconds`.
        self._observe(size, seconds, now)

    def decide(self, hit: Hit, now: float) -> Decision:
        """Choose the way of a request; see the module. `now`: seconds of the caller's clock."""
        if not self.breaker.allows:
            return _compute(Reason.BREAKER_OPEN)
        deadline = DEADLINE_SHARE * self._compute_chunks(hit, hit.chunks)
        if deadline < _LEAST_DEADLINE:
            return _compute(Reason.UNPROFITABLE)
        size = hit.chunks * hit.chunk_bytes
        can_halve = hit.can_do_both and hit.chunks > 1
        # Measure the store: with too few loads, or after `retry` seconds without one.
        is_known = self._ended >= (_TRIALS if can_halve else 1)
        is_due = not is_known or now - self._last_load > self._retry
        is_trial = is_due or size >= _LARGER * self._largest
        if hit.can_do_both:
            decision = self._best(hit, deadline)
            # A decision to load measures the store anyway.
            is_trial = is_trial and not decision.chunks
        else:
            decision = self._loadable_prefix(hit, deadline)
        if not is_trial:
            return decision
        self._largest = max(self._largest, size)
        self._last_load, self._is_retry = now, is_due or self._is_retry
        if can_halve:
            return self._both(hit, hit.chunks // 2, deadline / DEADLINE_SHARE)
        return Decision(hit.chunks, deadline)

    def decide_hand_off(self, hit: Hit, limit: float) -> Decision:
        """Choose the way for chunks that another engine has just stored for this request: load them
        within `limit` seconds, whatever is predicted."""
        if not self.breaker.allows:
            return _compute(Reason.BREAKER_OPEN)
        seconds = self._load_chunks(hit, hit.chunks)
        way = Way.LAYERS if self._layers_pay(hit, seconds) else Way.LOAD
        return Decision(hit.chunks, limit, way=way)

    def split(self, hit: Hit, least: int = 0) -> tuple[int, float]:
        """The best k of BOTH, `least` or more: the number of leading chunks to compute while the
        others are loaded. Also returns the predicted seconds until both have ended."""

        def seconds(front: int) -> float:
            compute = self._compute_chunks(hit, front)
            return max(compute, self._load_chunks(hit, hit.chunks - front))

        # With k, computing takes longer and loading shorter: the best k is where they cross.
        crossing = bisect_left(
            range(hit.chunks),
            True,
            key=lambda k: self._compute_chunks(hit, k) >= self._load_chunks(hit, hit.chunks - k),
        )
        front = min((max(crossing - 1, least), max(crossing, least)), key=seconds)
        return front, seconds(front)

    def is_load_sooner(self, tokens: int, context: int, size: int) -> bool:
        """Whether loading `size` bytes is predicted to take less time than computing `tokens` after
        `context` cached tokens."""
        return self.loading.predict(1, size) < self.compute_seconds(tokens, context)

    def _observe(self, size: int, seconds: float, now: float) -> None:
        self.loading.observe(1, size, seconds)
        self._ended += 1
        self._last_load = now

    def _best(self, hit: Hit, deadline: float) -> Decision:
        """The way with the least predicted time, for an engine that can do BOTH."""
        load, compute = self._load_chunks(hit, hit.chunks), self._compute_chunks(hit, hit.chunks)
        is_in_time = load <= _HEADROOM * deadline
        alone = load if is_in_time else compute
        # If loading all may end too late, compute at least the first chunk.
        front, both = self.split(hit, least=0 if is_in_time else 1)
        is_both = 0 < front < hit.chunks and both <= (1 - _BOTH_GAIN) * alone
        if is_in_time and self._layers_pay(hit, both if is_both else alone):
            return Decision(hit.chunks, deadline, way=Way.LAYERS)
        if is_both:
            return self._both(hit, front, _REAR_WAIT * self._load_chunks(hit, hit.chunks - front))
        return Decision(hit.chunks, deadline) if is_in_time else _compute(Reason.UNPROFITABLE)

    def _both(self, hit: Hit, front: int, deadline: float) -> Decision:
        """Compute `front` chunks and load the others, which have `deadline` seconds."""
        compute = self._compute_chunks(hit, hit.chunks) - self._compute_chunks(hit, front)
        max_wait = DEADLINE_SHARE * compute
        return Decision(hit.chunks, deadline, way=Way.BOTH, front=front, max_wait=max_wait)

    def _layers_pay(self, hit: Hit, other: float) -> bool:
        """Whether LAYERS beats the best other way, which takes `other` seconds before it computes
        the tokens after the chunks."""
        if hit.groups < 2 or not self.loading.samples:
            return False
        load = self._load_chunks(hit, hit.chunks)
        tail = self.compute_seconds(hit.tail, hit.context + hit.chunks * hit.chunk_tokens)
        layered = load / hit.groups + max(load - load / hit.groups, tail)
        return layered <= (1 - _OVERLAP_GAIN) * (other + tail)

    def _loadable_prefix(self, hit: Hit, deadline: float) -> Decision:
        """Load as many leading chunks as are predicted to come in time, if that beats computing."""
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
    """Pairs of a token and a token that it attends to: what attention's time grows with."""
    return tokens * (context + (tokens + 1) / 2)
