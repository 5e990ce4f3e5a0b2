"""The counters of the scheduler's side, and the observer that feeds them from look-ups. No I/O."""

from typing import Protocol

from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState


class Counters(Protocol):
    """Receives what becomes metrics; `stats.Counts` implements it."""

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None: ...
    def add_stored(self, tokens: int) -> None: ...
    def add_not_loaded(self, chunks: int, reason: Reason) -> None: ...
    def add_not_stored(self, reason: Reason) -> None: ...
    def add_transfer(self, seconds: float) -> None: ...
    def add_failed_transfer(self) -> None: ...
    def set_breaker(self, state: BreakerState) -> None: ...
    def set_failure(self, message: str) -> None: ...


class LookUpObserver:
    """Observer of the scheduler's StoreClient, which only looks up; workers load and save."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def record_load(self, chunks: int, size: int, seconds: float) -> None: ...
    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None: ...
    def record_not_stored(self, reason: Reason) -> None: ...

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self._counters.add_not_loaded(chunks, reason)

    def record_breaker(self, state: BreakerState) -> None:
        self._counters.set_breaker(state)

    def record_failure(self, message: str) -> None:
        self._counters.set_failure(message)
