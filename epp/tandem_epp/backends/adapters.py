"""LoRA adapters of an engine: which are in use, and which its slots probably hold. Pure.

An engine holds `slots` adapters on the GPU at once (vLLM's `--max-loras`). A request for another
one first loads it, in place of the adapter that was not used for longest, and waits while every
slot has an adapter of a running request. Metrics report only adapters that are in use; an adapter
whose requests have ended stays in its slot, so the last `slots` adapters count as resident.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

LOAD_SECONDS: Final = 0.3
"""Seconds to load an adapter that is not resident; a prior, not learned. vLLM copies it from the
CPU's memory in tens of milliseconds, and reads it from disk in up to seconds. Too low: adapters
move between pods. Too high: requests queue on the pod that has theirs."""
WAIT_SECONDS: Final = 5.0
"""Seconds until a slot is free, when every slot has an adapter of a running request; a prior."""


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """LoRA adapters as the engine's metrics report them."""

    running: frozenset[str] = frozenset()
    """Adapters of running requests: each occupies a slot."""
    waiting: frozenset[str] = frozenset()
    """Adapters of waiting requests."""
    slots: int = 0
    """Adapters that the engine can hold on the GPU at once (`--max-loras`)."""


_UNKNOWN: Final = AdapterSlots()


class PodAdapters:
    """The adapters of one pod. The questions below are about adapters, not about base models."""

    def __init__(self) -> None:
        self.reported = _UNKNOWN
        """As of the last scrape that reported any; without slots until then."""
        self._resident: dict[str, None] = {}
        """Adapters that the slots probably hold, the least recently used first."""

    def apply(self, reported: AdapterSlots | None) -> None:
        """Take in a scrape; None: the page reports no adapters."""
        self.reported = reported or _UNKNOWN
        for name in sorted(self.reported.running):
            self.use(name)

    def use(self, name: str) -> None:
        """A request for `name` was placed here, or runs here: it will be resident."""
        self._resident.pop(name, None)
        self._resident[name] = None
        while len(self._resident) > max(1, self.reported.slots):
            del self._resident[next(iter(self._resident))]

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters that the slots probably hold, the least recently used first."""
        return tuple(self._resident)

    def take_over(self, names: Iterable[str]) -> None:
        """Another replica believes these to be resident, the least recently used first. What was
        used here since counts as newer. How many slots there are, it knew."""
        older = [name for name in names if name not in self._resident]
        count = max(self.reported.slots, len(older), len(self._resident))
        latest = [*older, *self._resident][-count:]
        self._resident = dict.fromkeys(latest)

    def clear(self) -> None:
        """Forget everything: another process holds no adapter."""
        self.reported = _UNKNOWN
        self._resident.clear()

    @property
    def exclusive(self) -> frozenset[str] | None:
        """The only adapters for which a request can start here, because each slot has an adapter of
        a running request; None: any adapter can be loaded."""
        running, slots = self.reported.running, self.reported.slots
        return running if slots and len(running) >= slots else None

    def can_load(self, name: str) -> bool:
        """Whether a request for `name` can start: its adapter runs, or a slot is free for it. True
        while the engine has not reported its slots."""
        exclusive = self.exclusive
        return exclusive is None or name in exclusive

    def load_seconds(self, name: str) -> float:
        """Seconds until the adapter `name` can be used here: 0 if it is resident."""
        if not self.can_load(name):
            return WAIT_SECONDS + LOAD_SECONDS
        return 0.0 if name in self._resident else LOAD_SECONDS

    def affinity(self, name: str) -> float:
        """llm-d's score: 1 if `name` runs here, 0.8 if a slot is left for it, 0.6 if it waits here,
        else 0."""
        reported = self.reported
        if name in reported.running:
            return 1.0
        if not reported.slots or len(reported.running | reported.waiting) < reported.slots:
            return 0.8
        return 0.6 if name in reported.waiting else 0.0
