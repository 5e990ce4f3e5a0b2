"""A cache of misses: keys that a store did not have a moment ago. Pure."""

from collections import OrderedDict


class MissingKeys:
    """The newest misses, for some seconds."""

    def __init__(self, capacity: int = 65_536, seconds: float = 5.0) -> None:
        """`seconds`: age at which a miss is forgotten. Longer: engines compute chunks that another
        engine has stored meanwhile. Shorter: more look-ups."""
        self._capacity, self._seconds = capacity, seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: str, now: float) -> None:
        """The store does not have `key`."""
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > self._capacity:
            self._until.popitem(last=False)

    def discard(self, key: str) -> None:
        """The store has `key` now."""
        self._until.pop(key, None)

    def has(self, key: str, now: float) -> bool:
        """Whether the store is known not to have `key`."""
        return self._until.get(key, 0.0) > now
