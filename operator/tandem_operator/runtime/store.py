"""An indexed store of API objects of one kind, kept as small values.

Both the watches and the answers to the operator's own writes go in here. A reconciliation that
follows a write therefore sees its result, although the watch event is still on the way. Objects are
identified by uid, and of two versions of one object the newer stays, so both sources may deliver in
any order.
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MAX_TOMBSTONES: Final = 10_000
"""Deleted objects to remember, so that a late answer to a write does not bring one back."""


@dataclass(frozen=True, slots=True)
class WatchScope:
    """The objects of one kind in one namespace, or in all of them: what one watch delivers."""

    api_version: str
    kind: str
    namespace: str | None
    """None: all namespaces, or cluster-scoped objects."""

    def has(self, other: "WatchScope") -> bool:
        same_kind = (self.api_version, self.kind) == (other.api_version, other.kind)
        return same_kind and self.namespace in (None, other.namespace)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[K, V]):
    version: int
    scope: WatchScope
    keys: tuple[K, ...]
    value: V


class Store(Generic[K, V]):
    """Values by uid, with an index from each key to the values of all objects that have it."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[K, V]] = {}
        self._uids_by_key: dict[K, set[str]] = {}
        self._tombstones: dict[str, float] = {}
        """uid → version of the deletion; the oldest first."""

    def __len__(self) -> int:
        return len(self._entries)

    def by_key(self, key: K) -> list[V]:
        """The values that have `key`, in no particular order."""
        return [self._entries[uid].value for uid in self._uids_by_key.get(key, ())]

    def get(self, uid: str) -> V | None:
        entry = self._entries.get(uid)
        return None if entry is None else entry.value

    def all_keys(self) -> list[K]:
        return list(self._uids_by_key)

    def values(self) -> Iterator[V]:
        return (entry.value for entry in self._entries.values())

    def put(
        self,
        uid: str,
        version: int,
        keys: Iterable[K],
        value: V,
        *,
        scope: WatchScope,
        listed_at: int | None = None,
    ) -> set[K]:
        """Store `version` of an object unless a newer one is known.

        `listed_at`: the version of the list that the object comes from. The list shows the object
        as it was then, so it replaces all that is older than the list, even a newer version of the
        object: in a cluster that was restored, versions of objects go back.
        Returns the keys that this affects: those of the new and of the old version when the value
        or the keys differ, none when they do not.
        """
        previous, new_keys = self._entries.get(uid), tuple(keys)
        deleted_at = self._tombstones.get(uid, -1)
        # Infinity says that the object is gone, but not since when: the list may know better, and
        # if it does not, the watch that follows it reports the deletion.
        if version <= deleted_at and (listed_at is None or listed_at < deleted_at < math.inf):
            return set()  # Deleted at this version or later.
        if previous is not None and previous.version > max(version, listed_at or 0):
            return set()
        # An older removal no longer counts: the object had only left the watch's selector.
        self._tombstones.pop(uid, None)
        # The keys may have changed, for example when a pool moves to another endpoint.
        self._unlink(uid)
        self._entries[uid] = _Entry(version, scope, new_keys, value)
        for key in new_keys:
            self._uids_by_key.setdefault(key, set()).add(uid)
        if previous is None:
            return set(new_keys)
        if previous.value == value and previous.keys == new_keys:
            return set()
        # The old keys too: what the object has left must be reconciled as well.
        return {*previous.keys, *new_keys}

    def uids_in(self, scope: WatchScope, version: int) -> set[str]:
        """The objects of `scope` that are known as they were at `version` or before."""
        return {
            uid
            for uid, entry in self._entries.items()
            if entry.version <= version and scope.has(entry.scope)
        }

    def forget(self, scope: WatchScope) -> None:
        """Drop the objects of `scope`, and all deletions: their versions mean nothing any more."""
        for uid in [uid for uid, entry in self._entries.items() if scope.has(entry.scope)]:
            self._unlink(uid)
            del self._entries[uid]
        self._tombstones.clear()

    def remove(self, uid: str, version: float = math.inf) -> set[K]:
        """Remove an object and return the keys it had.

        `version` is that of the deletion, or of the change by which the object left the watch's
        selector; only a newer version brings it back. Infinity: nothing does.
        """
        # Also for an unknown uid: the answer to its creation may arrive after the watch's DELETED.
        self._tombstones[uid] = version
        if len(self._tombstones) > _MAX_TOMBSTONES:
            # Dicts keep insertion order, so the first is the oldest.
            del self._tombstones[next(iter(self._tombstones))]
        keys = self._unlink(uid)
        self._entries.pop(uid, None)
        return set(keys)

    def _unlink(self, uid: str) -> tuple[K, ...]:
        """Take an object out of the index; its keys."""
        if (entry := self._entries.get(uid)) is None:
            return ()
        for key in entry.keys:
            uids = self._uids_by_key[key]
            uids.discard(uid)
            # `all_keys` lists the keys of existing objects only, and the index does not grow.
            if not uids:
                del self._uids_by_key[key]
        return entry.keys
