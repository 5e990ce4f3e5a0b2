"""An engine's background task that keeps a namespace within its bounds: it writes touch records
and, if this engine is elected, collects.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from .bounds_file import BoundsReader
from .collector import Collector, OnRemoved, Touches
from .errors import StoreError
from .stores import ObjectStore

_log = logging.getLogger(__name__)

TOUCH_SECONDS: Final = 600.0
"""Seconds between two touch records of an engine. Longer: a chunk that is in use may be deleted
before an unused one. Shorter: more small objects."""
COLLECT_SECONDS: Final = 20.0
"""Seconds between two rounds of a collector; in each it reads the lease."""
LAST_RECORD_SECONDS: Final = 5.0
"""Seconds that the last touch record may take. Longer: while the store stalls, an engine that stops
may not end before it is killed. Shorter: a slow store does not learn of the last uses."""


class Maintenance:
    """Touch records and collector of one engine. For one event loop."""

    def __init__(
        self, objects: ObjectStore, bounds: BoundsReader, on_removed: OnRemoved = lambda _: None
    ) -> None:
        """`on_removed` is called with the keys of chunks that this engine's collector deletes."""
        self.touches = Touches(objects)
        self._bounds = bounds
        self._collector = Collector(objects, bounds, on_removed=on_removed)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task and write the last touch record, for at most LAST_RECORD_SECONDS."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        try:
            async with asyncio.timeout(LAST_RECORD_SECONDS):
                await self._flush()
        except TimeoutError:
            _log.warning("the last touch record was given up after %.0f s", LAST_RECORD_SECONDS)

    async def _run(self) -> None:
        collecting = asyncio.create_task(self._collector.run(COLLECT_SECONDS))
        try:
            while True:
                await asyncio.sleep(TOUCH_SECONDS)
                await self._flush()
        finally:
            collecting.cancel()

    async def _flush(self) -> None:
        # Without bounds no collector would read the records, or delete them.
        if self._bounds() is None:
            return
        try:
            await self.touches.flush()
        except StoreError as err:
            # The keys are kept: the next record has them.
            _log.warning("touch record not written: %s", err)
        except Exception:  # noqa: BLE001 - a defect here must not end the collector
            _log.exception("writing a touch record failed with an internal error")
