"""The circuit breaker of a store, and the background probes that close it."""

import asyncio
import logging
from typing import Final, Protocol

from .errors import ObjectMissing, StoreError, message_of
from .guard.breaker import Breaker, BreakerState
from .stores import ObjectStore

_log = logging.getLogger(__name__)

PROBE_NAME: Final = "probe"
"""Object that the probes ask for. It does not exist: a 404 shows that the store answers."""
NO_ANSWER: Final = "no answer in time"


class HealthObserver(Protocol):
    """Receives failures of the store and the state of its circuit breaker."""

    def record_breaker(self, state: BreakerState) -> None:
        """The circuit breaker is in `state` now."""

    def record_failure(self, message: str) -> None:
        """The store failed; `message` says how, without the object's name."""


class StoreHealth:
    """Records how requests to one store ended. While the breaker is open, a background task probes
    the store."""

    def __init__(self, breaker: Breaker, objects: ObjectStore, observer: HealthObserver) -> None:
        self._breaker, self._objects, self._observer = breaker, objects, observer
        self._probe: asyncio.Task[None] | None = None

    def record_success(self) -> None:
        """The store answered."""
        was_open = not self._breaker.allows
        self._breaker.record_success()
        if was_open and self._breaker.allows:
            _log.info("the external store answers again: it is used from now on")
        self._observer.record_breaker(self._breaker.state)

    def record_failure(self, message: str) -> None:
        """The store failed; see `HealthObserver`."""
        self._observer.record_failure(message)
        was_open = not self._breaker.allows
        self._breaker.record_failure(_now())
        if not was_open and not self._breaker.allows:
            _log.warning(
                "the external store failed several times in a row, the last time with: %s; it is"
                " not used until it answers a probe in the background",
                message,
            )
        self._observer.record_breaker(self._breaker.state)
        if not self._breaker.allows and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_until_closed())

    async def close(self) -> None:
        """End the probes."""
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
                    # Cut: an object of this name may exist, of any size.
                    await self._objects.get(PROBE_NAME, 1 << 10, is_cut=True)
                self.record_success()
            except ObjectMissing:
                self.record_success()
            except TimeoutError:
                self.record_failure(NO_ANSWER)
            except StoreError as err:
                self.record_failure(message_of(err))
            except Exception:  # noqa: BLE001 - without probes the breaker would stay open
                _log.exception("probing the store failed with an internal error")
                self.record_failure("internal error")


def _now() -> float:
    return asyncio.get_running_loop().time()
