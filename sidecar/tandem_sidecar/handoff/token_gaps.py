"""Learns how long an engine lets its streams wait for a token, and when one has waited too long.

    gaps.add(seconds, now)          a stream got a token, so many seconds after the one before
    token_deadline(gaps.value(now), gaps.count, floor=3)        when the next one is late

An API server can answer `/health` while the engine core behind it hangs. Only the tokens that do
not come tell it. The deadline follows what the engine was seen to take, as time-outs by arrival
times do (Chen, Toueg and Aguilera, "On the quality of service of failure detectors", 2002;
RFC 6298 for TCP). They add a margin to a mean. The times between tokens have a long tail instead: a
step that computes a prompt, a preempted request. So the margin is a multiple of the longest one of
the last minutes.
"""

from typing import Final, NamedTuple

FACTOR: Final = 4.0
"""The deadline over the longest time between two tokens. Too low: streams leave an engine that
computes one long prompt."""
HALF_LIFE: Final = 60.0
"""Seconds after which a long time counts for half. Too long: one preemption makes the deadline
useless for an hour."""
FEWEST: Final = 8
"""Times that have to be known. Fewer: what an engine does in its first second decides."""
WINDOW: Final = 300.0
"""Seconds of which `Prompts` knows at least the last, and at most twice as many. Too few: a long
prompt is always the first of its length."""


class Longest:
    """The longest of some durations, in seconds; it halves every `HALF_LIFE`."""

    __slots__ = ("_at", "_seconds", "count")

    def __init__(self) -> None:
        self.count = 0
        self._seconds = self._at = 0.0

    def add(self, seconds: float, now: float, count: int = 1) -> None:
        """The longest of `count` more lasted `seconds`; they ended `now`."""
        self._seconds, self._at = max(seconds, self.value(now)), now
        self.count += count

    def value(self, now: float) -> float:
        """What is left of the longest by `now`."""
        if not self._seconds:
            return 0.0
        decay: float = 0.5 ** ((now - self._at) / HALF_LIFE)
        return self._seconds * decay


class Prompts:
    """The longest time that an engine lately took for a stream's first token, in seconds, and the
    longest of these streams' prompts, in bytes. Both are of the same streams: forgetting only the
    time, the next prompt as long would seem late."""

    __slots__ = ("_before", "_latest", "_since")

    def __init__(self) -> None:
        self._latest = self._before = _Window()
        self._since = 0.0

    def add(self, seconds: float, size: int, now: float) -> None:
        """The first token after a prompt of `size` bytes took `seconds`; it came `now`."""
        if now - self._since >= WINDOW:
            is_recent = now - self._since < 2 * WINDOW
            self._before = self._latest if is_recent else _Window()
            self._latest, self._since = _Window(), now
        longest, prompt, streams = self._latest
        self._latest = _Window(max(longest, seconds), max(prompt, size), streams + 1)

    @property
    def seconds(self) -> float:
        """The longest time."""
        return max(self._before.seconds, self._latest.seconds)

    @property
    def count(self) -> int:
        """How many streams are known."""
        return self._before.streams + self._latest.streams

    def covers(self, size: int) -> bool:
        """Whether a prompt of `size` bytes, 0 if that is not known, is one of those that enough is
        known of."""
        return self.count >= FEWEST and 0 < size <= max(self._before.size, self._latest.size)


class _Window(NamedTuple):
    """What is known of the streams of some time."""

    seconds: float = 0.0
    size: int = 0
    streams: int = 0


def token_deadline(
    longest: float, count: int, *, floor: float, prefill: float = 0.0
) -> float | None:
    """Seconds without a token after which a stream is late; None: too little is known.

    `longest`: the longest of `count` times between two tokens of a stream, or until the first of
    one. `floor`: the shortest deadline: as long as legs wait for an engine that answers no probe.
    `prefill`: how long the engine may take for a prompt it has to compute, for which all its
    streams may wait; 0: it has none.
    """
    if count < FEWEST:
        return None
    return max(floor, FACTOR * longest) + prefill
