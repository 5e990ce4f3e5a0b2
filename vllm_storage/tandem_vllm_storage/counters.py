"""The counters of the scheduler's side, and the observer that feeds them from look-ups. No I/O."""

from typing import Protocol

from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState
from tandem_kvstore.observer import NullObserver


class Counters(Protocol):
    """Receives what becomes metrics; `stats.Counts` implements it."""

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None:
        """A load brought `tokens` tokens, `size` bytes of all workers together, in `seconds`."""

    def add_stored(self, tokens: int) -> None:
        """All workers have stored the KV of `tokens` tokens."""

    def add_not_loaded(self, chunks: int, reason: Reason) -> None:
        """`chunks` chunks are computed instead of loaded."""

    def add_not_stored(self, reason: Reason) -> None:
        """A worker did not store its part of a chunk."""

    def add_transfer(self, seconds: float) -> None:
        """A hand-off's look-up and load took `seconds` together."""

    def add_failed_transfer(self) -> None:
        """A hand-off's KV was not loaded as a whole."""

    def set_breaker(self, state: BreakerState) -> None:
        """The circuit breaker of the store is in `state` now."""

    def set_failure(self, message: str) -> None:
        """The store failed; `message` is its newest failure."""


class LookUpObserver(NullObserver):
    """Observer of the scheduler's StoreClient, which only looks up; workers load and save."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self._counters.add_not_loaded(chunks, reason)

    def record_breaker(self, state: BreakerState) -> None:
        self._counters.set_breaker(state)

    def record_failure(self, message: str) -> None:
        self._counters.set_failure(message)
