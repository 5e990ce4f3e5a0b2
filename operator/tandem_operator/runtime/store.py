"""Objects of one kind as small values, by key: what the watches brought and what was written here.

A write's answer is put here at once, so a pass that follows sees it although its event is still on
the way. Every object is known by its uid; of two versions of one object the newer stays.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_TOMBSTONES: Final = 10_000
"""Deleted objects remembered, so that a late answer to a write does not bring one back."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[K, V]):
    version: int
    keys: tuple[K, ...]
    value: V


class Store(Generic[K, V]):
    """uid → value, and key → the values of all objects that have it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[K, V]] = {}
        self._by_key: dict[K, set[str]] = {}
        self._gone: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: K) -> list[V]:
        """The values under `key`, in no order."""
        return [self._entries[uid].value for uid in self._by_key.get(key, ())]

    def all_keys(self) -> list[K]:
        return list(self._by_key)

    def values(self) -> Iterator[V]:
        return (entry.value for entry in self._entries.values())

    def uids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def put(self, uid: str, version: int, keys: Iterable[K], value: V) -> set[K]:
        """Remember an object's `version`; the keys whose values changed by that, old ones too."""
        before, now = self._entries.get(uid), tuple(keys)
        if version <= self._gone.get(uid, -1) or (before is not None and before.version > version):
            return set()
        self._gone.pop(uid, None)
        self._unlink(uid)
        self._entries[uid] = _Entry(version, now, value)
        for key in now:
            self._by_key.setdefault(key, set()).add(uid)
        if before is None:
            return set(now)
        if before.value == value and before.keys == now:
            return set()
        return {*before.keys, *now}

    def drop(self, uid: str, version: float = math.inf) -> set[K]:
        """The object is deleted, or has left what is watched at `version`: nothing older brings it
        back. The keys it had."""
        self._gone[uid] = version
        if len(self._gone) > _TOMBSTONES:
            del self._gone[next(iter(self._gone))]
        keys = self._unlink(uid)
        self._entries.pop(uid, None)
        return set(keys)

    def _unlink(self, uid: str) -> tuple[K, ...]:
        if (entry := self._entries.get(uid)) is None:
            return ()
        for key in entry.keys:
            held = self._by_key[key]
            held.discard(uid)
            if not held:
                del self._by_key[key]
        return entry.keys
