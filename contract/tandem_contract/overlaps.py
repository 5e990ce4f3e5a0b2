"""How many other prompts an engine was given while it computed one: `Timing.inflight`.

    overlap = overlaps.begin(engine)    a prompt is sent to `engine`
    overlap.others                      those that were under way beside it so far
    overlap.end()                       its first token, or its end without one

The sidecar counts the prompts that it sends, the EPP those that it knows of. The EPP compares both
numbers, so they must mean the same: both sides count with this module.
"""

from collections.abc import Hashable
from typing import Final


class _Engine:
    """The prompts of one engine."""

    __slots__ = ("begun", "open")

    def __init__(self) -> None:
        self.open = self.begun = 0


class Overlap:
    """One prompt that is under way."""

    __slots__ = ("_before", "_end", "_engine", "_key", "_overlaps")

    def __init__(self, overlaps: "Overlaps", key: Hashable, engine: _Engine) -> None:
        self._overlaps, self._key, self._engine = overlaps, key, engine
        self._before = engine.begun - engine.open
        """Prompts that had ended when this one began."""
        self._end: int | None = None
        """Prompts that had begun when this one ended."""
        engine.open += 1
        engine.begun += 1

    @property
    def others(self) -> int:
        """Other prompts that were under way at some time while this one was."""
        begun = self._engine.begun if self._end is None else self._end
        return begun - self._before - 1

    def end(self) -> None:
        """This prompt is no longer under way; a second call does nothing."""
        if self._end is None:
            self._end = self._engine.begun
            self._overlaps.close(self._key)


class Overlaps:
    """The prompts under way at each engine. An engine without any takes no memory."""

    def __init__(self) -> None:
        self._engines: Final[dict[Hashable, _Engine]] = {}

    def begin(self, key: Hashable) -> Overlap:
        """A prompt is sent to the engine `key`."""
        return Overlap(self, key, self._engines.setdefault(key, _Engine()))

    def close(self, key: Hashable) -> None:
        """A prompt of the engine `key` ended; called by `Overlap.end`."""
        engine = self._engines[key]
        engine.open -= 1
        if not engine.open:
            del self._engines[key]

    def under_way(self, key: Hashable) -> int:
        """Prompts under way at the engine `key`."""
        engine = self._engines.get(key)
        return engine.open if engine is not None else 0

    def __len__(self) -> int:
        """Engines with a prompt under way."""
        return len(self._engines)
