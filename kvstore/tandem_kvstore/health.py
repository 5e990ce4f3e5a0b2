"""What a client knows of its store's health: the circuit breaker, and the probes that close it."""

import asyncio
from typing import Final, Protocol

from .errors import ObjectMissing, StoreError, words_of
from .guard.breaker import Breaker, BreakerState
from .stores import ObjectStore

PROBE_NAME: Final = "probe"
"""Name that the breaker's probes ask for. It does not exist: 404 shows that the store answers."""
NO_ANSWER: Final = "no answer in time"


class HealthObserver(Protocol):
    """Is told of failures, and of the breaker's state."""

    def record_breaker(self, state: BreakerState) -> None:
        """The state of the circuit breaker now."""

    def record_failure(self, words: str) -> None:
        """The store failed, in its own words or the client's."""


class StoreHealth:
    """The circuit breaker of one store. While it is open, a background task probes the store."""

    def __init__(self, breaker: Breaker, objects: ObjectStore, observer: HealthObserver) -> None:
        self._breaker, self._objects, self._observer = breaker, objects, observer
        self._probe: asyncio.Task[None] | None = None

    def record_success(self) -> None:
        """The store answered."""
        self._breaker.record_success()
        self._observer.record_breaker(self._breaker.state)

    def record_failure(self, words: str) -> None:
        """The store failed, in its own words or the client's."""
        self._observer.record_failure(words)
        self._breaker.record_failure(_now())
        self._observer.record_breaker(self._breaker.state)
        if not self._breaker.allows and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_until_closed())

    async def close(self) -> None:
        """End the probe."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)

    async def _probe_until_closed(self) -> None:
        while not self._breaker.allows:
            await asyncio.sleep(0.05)
            if not self._breaker.start_probe(_now()):
                continue
            try:
                async with asyncio.timeout(2.0):
                    await self._objects.get(PROBE_NAME, 1 << 10)
                self.record_success()
            except ObjectMissing:
                self.record_success()
            except TimeoutError:
                self.record_failure(NO_ANSWER)
            except StoreError as err:
                self.record_failure(words_of(err))


def _now() -> float:
    return asyncio.get_running_loop().time()
