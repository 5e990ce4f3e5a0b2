"""What a client of a store reports to its engine, for the engine's metrics."""

from typing import Protocol

from .errors import Reason
from .guard.breaker import BreakerState
from .health import HealthObserver


class Observer(HealthObserver, Protocol):
    """Receives the results of loads and writes."""

    def record_load(self, chunks: int, size: int, seconds: float) -> None:
        """A load brought `chunks` chunks of `size` bytes."""

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        """`chunks` chunks were not loaded, for `reason`."""

    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None:
        """A chunk of `size` bytes is stored. `is_new`: this client wrote it; else another writer
        was first."""

    def record_not_stored(self, reason: Reason) -> None:
        """A chunk was not stored, for `reason`."""


class NullObserver:
    """Ignores all reports; a base for observers that use few of them."""

    def record_load(self, chunks: int, size: int, seconds: float) -> None: ...
    def record_not_loaded(self, chunks: int, reason: Reason) -> None: ...
    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None: ...
    def record_not_stored(self, reason: Reason) -> None: ...
    def record_breaker(self, state: BreakerState) -> None: ...
    def record_failure(self, message: str) -> None: ...
