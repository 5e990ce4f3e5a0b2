"""Keeps a namespace within its bounds: touch records, the election of a collector, and deletions.

    engines ──touch records──► namespace ──listing──► plan_collection ──► deletes
                                  ▲ lease: conditional PUT elects one collector

Every engine may run a collector; the lease lets one of them act. Clocks of two machines are never
compared: a process takes a lease over when it has not seen it change for the lease's duration, by
its own clock; ages are differences of the store's times, and "now" is the time at which the store
wrote the lease last.

A long round renews the lease, and ends when it is lost. A process that was paused for longer than
the lease ends its round, too, and forgets since when data had no manifest: another process may have
acted meanwhile. So each process deletes only data that it saw without a manifest for the I/O
deadline while no other process acted.

A store that refuses conditional writes, or ignores conditions, keeps the lease of the last writer.
Several processes may act there at once until each looks at the lease again, for a third of its
duration. They may then delete objects that are gone already, and touch records that another one has
not read.
"""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

import msgspec

from .bounds_file import BoundsReader
from .errors import (
    UNREADABLE,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnsupported,
)
from .format.collection import (
    LEASE,
    TOUCH_PREFIX,
    Bounds,
    Collection,
    Unreferenced,
    plan_collection,
)
from .format.manifest import key_of
from .stores import ObjectStore
from .stores.base import ObjectInfo, TaggedObject

_log = logging.getLogger(__name__)

_MAX_RECORD: Final = 4 << 20
_KEYS_PER_RECORD: Final = 50_000
_DENIALS: Final = 100
"""Denied deletions in a row that end a round: there may be no right to delete. Fewer: with many
locked objects, rounds get to the others only after hours."""
_DENIED_SECONDS: Final = 3600.0
"""For so long an object is left alone whose deletion the store denied, so that each round gets to
others. More: a right that is granted is noticed later."""

OnRemoved = Callable[[Sequence[str]], None]
"""Called with the keys of chunks that the collector has deleted."""


class _LeaseLost(Exception):
    """Another process may be the collector."""


class Touches:
    """The chunks that one engine used since its last touch record. For one event loop."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._writer = uuid.uuid4().hex
        self._number = 0
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, keys: Sequence[str]) -> None:
        """These chunks were used. Only the newest 50,000 are kept."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > _KEYS_PER_RECORD:
            self._keys.popitem(last=False)

    async def flush(self) -> None:
        """Write a touch record if any chunk was used. Raises StoreError; the keys are then kept."""
        if not self._keys:
            return
        keys = list(self._keys)
        self._number += 1
        name = f"{TOUCH_PREFIX}{self._writer}.{self._number}"
        await self._objects.put(name, (msgspec.json.encode(keys),))
        for key in keys:
            self._keys.pop(key, None)


class Collector:
    """One process's candidate for collecting a namespace. For one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        bounds: BoundsReader,
        *,
        lease: float = 60.0,
        on_removed: OnRemoved = lambda _: None,
    ) -> None:
        """`bounds` is called in each round. `lease`: seconds without a change after which another
        process takes the lease over. `on_removed` is called after a round with deletions."""
        self._objects, self._bounds, self._lease = objects, bounds, lease
        self._on_removed = on_removed
        self._holder = uuid.uuid4().hex
        # The lease of another process, and when this process first read this content.
        self._observed: tuple[bytes, float] | None = None
        # time.monotonic() just before this process last took or renewed the lease.
        self._renewed_at = 0.0
        self._unreferenced: dict[str, Unreferenced] = {}
        self._uses: dict[str, float] = {}
        self._records_read: set[str] = set()
        # Deletions in a row that the store denied, and when it denied each (time.monotonic()).
        self._denials = 0
        self._denied: dict[str, float] = {}

    async def collect(self, now: float | None = None) -> Collection | None:
        """Run one round and return its plan. Raises StoreError.

        Returns None if there are no bounds, if this process is not the collector (yet, or no
        longer), or if the store has no listing. `now`: seconds by the clock of this process.
        """
        now = time.monotonic() if now is None else now
        self._denials = 0
        if (bounds := self._bounds()) is None:
            return None
        self._renewed_at = time.monotonic()
        try:
            if not await self._take_lease(now):
                return None
            return await self._run_round(bounds)
        except _LeaseLost:
            self._unreferenced = {}
        except StoreUnsupported as err:
            _log.warning("this namespace is not collected: %s", err)
        return None

    async def _run_round(self, bounds: Bounds) -> Collection | None:
        objects = []
        async for info in self._objects.scan():
            await self._keep_lease()
            objects.append(info)
        monotonic = time.monotonic()
        await self._keep_lease()
        now = next((info.modified for info in objects if info.name == LEASE), None)
        if now is None:
            return None
        await self._read_records(objects)
        denied = (info.name for info in objects if self._is_denied(info.name))
        self._denied = {name: self._denied[name] for name in denied}
        plan = plan_collection(
            *(objects, self._uses, self._unreferenced, bounds),
            now=now,
            monotonic=monotonic,
            kept=self._denied,
        )
        await self._delete(plan, {info.name: info.modified for info in objects})
        return plan

    async def run(self, interval: float = 20.0) -> None:
        """Collect until cancelled; failures are logged and tried again."""
        while True:
            try:
                await self.collect()
            except StoreError as err:
                _log.warning("collecting failed: %s", err)
            except Exception:  # noqa: BLE001 - a defect in a round must not end the later ones
                _log.exception("collecting failed with an internal error")
            await asyncio.sleep(interval)

    async def _keep_lease(self) -> None:
        """Renew the lease when a third of it is over. Raises _LeaseLost, StoreError."""
        began = time.monotonic()
        if began - self._renewed_at < self._lease / 3:
            return
        # Without `_take_lease`: in mid-round a process does not take over.
        try:
            lease = await self._objects.get_tagged(LEASE, 1 << 12)
        except ObjectMissing as err:
            raise _LeaseLost from err
        is_ours = self._holder.encode() in bytes(lease.data)
        if not is_ours or not await self._write_lease(lease, is_ours=True):
            raise _LeaseLost
        # Too late, even if the lease seems kept: it may be this process's write over another's.
        if time.monotonic() - self._renewed_at > self._lease:
            raise _LeaseLost
        self._renewed_at = began

    async def _take_lease(self, now: float) -> bool:
        try:
            lease = await self._objects.get_tagged(LEASE, 1 << 12)
        except ObjectMissing:
            self._unreferenced = {}
            return await self._write_lease(None, is_ours=False)
        content = bytes(lease.data)
        is_ours = self._holder.encode() in content
        if not is_ours:
            if self._observed is None or self._observed[0] != content:
                self._observed = (content, now)
            if now - self._observed[1] < self._lease:
                return False
            # Taking over: since when data are unreferenced is not known, so they wait again.
            self._unreferenced = {}
        return await self._write_lease(lease, is_ours=is_ours)

    async def _write_lease(self, present: TaggedObject | None, *, is_ours: bool) -> bool:
        """Write the lease over the `present` one. Returns whether this process may act now."""
        try:
            return await self._put_lease(present, is_ours=is_ours)
        except StoreFull:
            # Only a round makes room, and a round needs a lease. Any process may delete a manifest:
            # its chunk is computed again, and running loads go on.
            name = LEASE if present is not None else await self._oldest_manifest()
            if name is None:
                raise
        if present is not None and not await self._is_lease(present):
            return False
        if await self._remove(name) and present is None:
            self._on_removed([name])
        return await self._put_lease(None, is_ours=is_ours)

    async def _is_lease(self, present: TaggedObject) -> bool:
        """Whether no other process has taken the lease since `present` was read."""
        try:
            lease = await self._objects.get_tagged(LEASE, 1 << 12)
        except ObjectMissing:
            return True
        return bytes(lease.data) == bytes(present.data)

    async def _oldest_manifest(self) -> str | None:
        """The manifest that was written first, so far as the store may delete it."""
        manifests = [
            (info.modified, info.name)
            async for info in self._objects.scan()
            if key_of(info.name) == info.name and not self._is_denied(info.name)
        ]
        return min(manifests, default=(0.0, None))[1]

    async def _put_lease(self, present: TaggedObject | None, *, is_ours: bool) -> bool:
        body = (msgspec.json.encode({"holder": self._holder, "renewal": uuid.uuid4().hex}),)
        try:
            if present is None or present.tag is not None:
                tag = present.tag if present is not None else None
                await self._objects.put_if(LEASE, body, tag)
                return True
        except (ObjectExists, ObjectMissing):
            return False
        # A denial may be of the condition alone; if not, the next write is denied, too.
        except (StoreUnsupported, StoreDenied):
            pass
        # Without conditions, or a tag to compare, the last writer has the lease.
        await self._objects.put(LEASE, body)
        return is_ours

    async def _read_records(self, objects: Sequence[ObjectInfo]) -> None:
        records = {i.name: i.modified for i in objects if i.name.startswith(TOUCH_PREFIX)}
        for name in records.keys() - self._records_read:
            await self._keep_lease()
            try:
                record = await self._objects.get(name, _MAX_RECORD)
                keys = msgspec.json.decode(record, type=list[str])
            except (ObjectMissing, ObjectTooLarge, *UNREADABLE):
                # Without it, chunks only look older than they are.
                keys = []
            for key in keys:
                self._uses[key] = max(self._uses.get(key, 0.0), records[name])
        self._records_read = set(records)
        live = {info.name for info in objects}
        self._uses = {key: used for key, used in self._uses.items() if key in live}

    async def _delete(self, plan: Collection, listed: Mapping[str, float]) -> None:
        """`listed`: when each object was written, by the listing."""
        self._unreferenced = dict(plan.unreferenced)
        removed: list[str] = []
        try:
            for name in plan.manifests:
                await self._keep_lease()
                if await self._remove(name):
                    removed.append(name)
        finally:
            # Also if a delete failed: the manifests before it are deleted.
            if removed:
                self._on_removed(removed)
        for name in plan.data:
            await self._keep_lease()
            if await self._is_written_again(name, listed[name]) or await self._remove(name):
                self._unreferenced.pop(name, None)
        for name in (*plan.records, *plan.unfinished):
            await self._keep_lease()
            await self._remove(name)

    async def _remove(self, name: str) -> bool:
        """Delete an object; returns whether it is gone. One that the store refuses to delete, for
        instance because of a lock, is left alone from then on, and the others are deleted. Raises
        StoreError after _DENIALS refusals in a row."""
        try:
            await self._objects.delete(name)
        except StoreDenied as err:
            self._denials += 1
            self._denied[name] = time.monotonic()
            if self._denials >= _DENIALS:
                raise
            _log.warning("the store refuses to delete an object, which stays: %s", err)
            return False
        self._denials = 0
        return True

    def _is_denied(self, name: str) -> bool:
        """Whether the store refused to delete the object not long ago."""
        return time.monotonic() - self._denied.get(name, -inf) < _DENIED_SECONDS

    async def _is_written_again(self, name: str, modified: float) -> bool:
        """Whether data have been written since the listing: a writer of the same bytes is about to
        write a manifest for them, or has written it."""
        try:
            info = await self._objects.info(name)
        # A store that does not say when is collected as it was listed.
        except (ObjectMissing, StoreUnsupported):
            return False
        # Stores round to seconds, and the listed time is minutes old. Their clock may go back, too.
        return abs(info.modified - modified) > 1.0
