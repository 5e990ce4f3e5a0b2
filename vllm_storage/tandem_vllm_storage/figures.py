"""What the scheduler's side counts, and what of it its client of the store reports. No I/O."""

from typing import Protocol

from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerState


class Figures(Protocol):
    """Counts what happens, for the metrics."""

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None: ...
    def add_stored(self, tokens: int) -> None: ...
    def add_not_loaded(self, chunks: int, reason: Reason) -> None: ...
    def add_not_stored(self, reason: Reason) -> None: ...
    def add_transfer(self, seconds: float) -> None: ...
    def add_failed_transfer(self) -> None: ...
    def set_breaker(self, state: BreakerState) -> None: ...
    def set_failure(self, message: str) -> None: ...


class LookUpObserver:
    """The look-ups' client counts what it does not find; workers count loads and saves."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def record_load(self, chunks: int, size: int, seconds: float) -> None: ...
    def record_stored(self, size: int, seconds: float, *, is_new: bool) -> None: ...
    def record_not_stored(self, reason: Reason) -> None: ...

    def record_not_loaded(self, chunks: int, reason: Reason) -> None:
        self._figures.add_not_loaded(chunks, reason)

    def record_breaker(self, state: BreakerState) -> None:
        self._figures.set_breaker(state)

    def record_failure(self, message: str) -> None:
        self._figures.set_failure(message)
