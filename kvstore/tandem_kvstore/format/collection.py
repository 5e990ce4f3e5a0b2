"""Plans what to delete from a namespace, from a listing of it. Pure.

A chunk is deleted when it was not used for the longest allowed time; and while the namespace is
above its capacity, the least recently used chunk is. The manifest goes first: from then on no load
of the chunk starts. Data are deleted when they have been without a manifest for the I/O deadline:
by then every load and every write of the chunk has ended. So no reader loses what it reads, and no
writer what it has written, with one exception. Data objects are named by their content, so a chunk
may be written again under the names of its old data. The collector looks at each data object once
more before it deletes it; if the writer comes between this look and the deletion, the new manifest
names data that are gone. Engines then compute the chunk, and write it again.
"""

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..stores.base import UNFINISHED, ObjectInfo
from .manifest import key_of

TOUCH_PREFIX: Final = "touch."
"""Start of the names of touch records: `touch.{writer}.{number}`."""
LEASE: Final = "collector"
"""Name of the object that elects the collector."""
WRITE_SECONDS: Final = 120.0
"""Longest time from a chunk's first data object to its manifest."""
LOAD_SECONDS: Final = 240.0
"""Longest load, from its first manifest to its last data, whatever deadline the engine sets."""

UNFINISHED_SECONDS: Final = 3600.0
"""Seconds after which the file of an unfinished object is deleted: its writer has died. More than
any write takes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one namespace."""

    capacity: int
    """Bytes of all objects. Above it, chunks are deleted until `low_water` of it is filled."""
    max_age: float
    """Seconds since a chunk was written or last used, after which it is deleted."""
    io_deadline: float = 300.0
    """Seconds that data stay after their manifest: more than LOAD_SECONDS and WRITE_SECONDS. Less:
    a reader finds data missing and computes."""
    low_water: float = 0.9
    """Share of the capacity."""

    def __str__(self) -> str:
        size = "no limit of bytes" if self.capacity == sys.maxsize else f"{self.capacity} bytes"
        return f"{size}, unused for at most {self.max_age:g} s"


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """A data object without a manifest."""

    since: float
    """When it was first seen like this, in seconds of the collector's monotonic clock: the store's
    clock may be set meanwhile."""
    modified: float
    """Unix seconds, by the store's clock. If it changes, the object was written again, and its
    writer is about to write a manifest for it."""


@dataclass(frozen=True, slots=True)
class Collection:
    """What to delete now: manifests, then data, then records and unfinished objects."""

    manifests: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    records: tuple[str, ...] = ()
    """Touch records older than the longest allowed age."""
    unfinished: tuple[str, ...] = ()
    """Objects that their writers left unfinished."""
    size: int = 0
    """Bytes of all objects before."""
    unreferenced: Mapping[str, Unreferenced] = field(default_factory=dict)
    """Data without a manifest, by name: an input of the next plan."""


def plan_collection(
    objects: Iterable[ObjectInfo],
    uses: Mapping[str, float],
    unreferenced: Mapping[str, Unreferenced],
    bounds: Bounds,
    *,
    now: float,
    monotonic: float,
    kept: Container[str] = frozenset(),
) -> Collection:
    """The plan for a listing.

    `uses`: time of the last use, by key, in Unix seconds by the store's clock, as `now`.
    `unreferenced`: from the last plan. `monotonic`: the collector's clock at the listing's end.
    `kept`: names of objects that the store refuses to delete; they fill the namespace all the same.
    """
    listed = list(objects)
    size = sum(item.size for item in listed)
    manifests: dict[str, ObjectInfo] = {}
    data: dict[str, list[ObjectInfo]] = {}
    for item in listed:
        if (chunk := key_of(item.name)) == item.name:
            manifests[item.name] = item
        elif chunk is not None:
            data.setdefault(chunk, []).append(item)
    used = {
        key: max(item.modified, uses.get(key, 0.0))
        for key, item in manifests.items()
        if key not in kept
    }
    unfinished = _older(listed, UNFINISHED, now - UNFINISHED_SECONDS, kept)
    excess = size - bounds.low_water * bounds.capacity if size > bounds.capacity else 0.0
    # Data without a manifest, and unfinished objects, are deleted in any case.
    excess -= sum(
        item.size
        for key, items in data.items()
        for item in items
        if key not in manifests and item.name not in kept
    )
    excess -= sum(item.size for item in unfinished)
    expired = _least_recently_used(manifests, data, used, now - bounds.max_age, excess)
    waiting, deleted = {}, []
    for key, items in data.items():
        # A manifest that this plan deletes still counts: its data wait from the next plan on.
        if key in manifests:
            continue
        for item in items:
            before = unreferenced.get(item.name)
            if before is None or before.modified != item.modified:
                before = Unreferenced(monotonic, item.modified)
            waiting[item.name] = before
            if monotonic - before.since > bounds.io_deadline and item.name not in kept:
                deleted.append(item.name)
    return Collection(
        manifests=tuple(expired),
        data=tuple(deleted),
        records=tuple(
            item.name for item in _older(listed, TOUCH_PREFIX, now - bounds.max_age, kept)
        ),
        unfinished=tuple(item.name for item in unfinished),
        size=size,
        unreferenced=waiting,
    )


def _older(
    objects: Iterable[ObjectInfo], prefix: str, time: float, kept: Container[str]
) -> list[ObjectInfo]:
    """Objects whose names start with `prefix`, written before `time`, without those `kept`."""
    return [
        item
        for item in objects
        if item.name.startswith(prefix) and item.modified < time and item.name not in kept
    ]


def _least_recently_used(
    manifests: Mapping[str, ObjectInfo],
    data: Mapping[str, list[ObjectInfo]],
    used: Mapping[str, float],
    oldest: float,
    excess: float,
) -> list[str]:
    """Keys of the least recently used chunks: all used before `oldest`, and more until `excess`
    bytes are deleted."""
    keys = []
    for key in sorted(used, key=used.__getitem__):
        if used[key] >= oldest and excess <= 0:
            break
        keys.append(key)
        excess -= manifests[key].size + sum(item.size for item in data.get(key, ()))
    return keys
