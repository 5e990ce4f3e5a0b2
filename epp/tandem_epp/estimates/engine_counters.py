"""What an engine's counters say about its speed: differences between two scrapes as samples.

For pods without a sidecar, and for what no response tells: ITL, transfers, lengths of answers. The
engine's counters sum durations over requests, so where prefills overlap the sum counts the same
seconds more than once, and a request counts in the window of its end, maybe long after its prefill.
`CounterWindow` therefore takes prefills only from a window in which few of them ended;
`own_requests` finds out more.
"""

from dataclasses import dataclass
from typing import Final

from tandem_planner.prefill_fit import PrefillSample

from .engine_figures import EngineCounters, difference

_IDLE_SHARE: Final = 0.5
"""Seconds of prefill per second of a window up to which they hardly overlapped."""
_MIN_SECONDS: Final = 0.5
"""Seconds of a window at least: a shorter one cuts too many requests in two."""
_MIN_TOKENS: Final = 16.0
"""Computed tokens per request from which a window says how long prefills take."""


@dataclass(frozen=True, slots=True)
class CounterSamples:
    """What happened between two scrapes; None: nothing, or not reported."""

    prefill: PrefillSample | None = None
    itl: float | None = None
    """Seconds between two tokens of a request, on average."""
    tokens_per_second: float = 0.0
    """Prompt tokens computed per second meanwhile."""
    generated: float = 0.0
    """Tokens generated."""
    answers: float = 0.0
    """Requests that ended."""
    transfer: tuple[float, float, float] | None = None
    """Transfers, bytes, and seconds of all of them."""
    load: tuple[float, float, float] | None = None
    """The same of loads from external storage."""
    loaded_tokens: float = 0.0
    """Tokens of these loads."""


class CounterWindow:
    """The counters of one engine since the last samples."""

    def __init__(self) -> None:
        self._counters: EngineCounters | None = None
        self._at = 0.0

    def restart(self) -> None:
        """The engine's process was replaced: its counters began at 0."""
        self._counters = None

    def advance(self, counters: EngineCounters, now: float) -> CounterSamples | None:
        """The samples since the last call that returned some; None while the window is short."""
        if (before := self._counters) is None:
            self._counters, self._at = counters, now
            return None
        if (seconds := now - self._at) < _MIN_SECONDS:
            return None
        self._counters, self._at = counters, now
        requests = difference(before.prefills, counters.prefills)
        generated = difference(before.generated_tokens, counters.generated_tokens)
        itls = difference(before.itls, counters.itls)
        return CounterSamples(
            _prefill(before, counters, requests, seconds),
            difference(before.itl_seconds, counters.itl_seconds) / itls if itls > 0 else None,
            difference(before.computed_tokens, counters.computed_tokens) / seconds,
            generated,
            requests,
            _transfer(before, counters),
            _load(before, counters),
            difference(before.loaded_tokens, counters.loaded_tokens),
        )


def _prefill(
    before: EngineCounters, after: EngineCounters, requests: float, seconds: float
) -> PrefillSample | None:
    tokens = difference(before.prefill_tokens, after.prefill_tokens)
    duration = difference(before.prefill_seconds, after.prefill_seconds)
    # On a decode pod most prompts come from elsewhere but for their last token: they would say
    # nothing of how fast it computes a prompt, and keep out what alike pods know of it.
    if requests < 1 or tokens < _MIN_TOKENS * requests or duration <= 0:
        return None
    if duration > _IDLE_SHARE * seconds:
        return None
    # As if all had the same length: the quadratic term needs only its size.
    return PrefillSample(int(requests), tokens, tokens * tokens / requests, duration)


def _transfer(before: EngineCounters, after: EngineCounters) -> tuple[float, float, float] | None:
    transfers = difference(before.transfers, after.transfers)
    count = difference(before.transfer_bytes, after.transfer_bytes)
    seconds = difference(before.transfer_seconds, after.transfer_seconds)
    return (transfers, count, seconds) if transfers > 0 and count > 0 and seconds > 0 else None


def _load(before: EngineCounters, after: EngineCounters) -> tuple[float, float, float] | None:
    if after.loads is None:
        return None
    loads = difference(before.loads, after.loads)
    count = difference(before.loaded_bytes, after.loaded_bytes)
    seconds = difference(before.load_seconds, after.load_seconds)
    return (loads, count, seconds) if loads > 0 and count > 0 and seconds > 0 else None
