"""Turns the prefills of a busy engine into samples of its speed.

An engine computes prompts in batches, so the durations of two prefills that overlap count the same
seconds twice. Prefills that overlap are joined: their tokens took the time from the first start to
the last end. While they keep overlapping, a sample is taken every SAMPLE_TOKENS tokens.

Prompts that another router placed, or whose clients left, take a part of that time too, and what
they have computed is not known. So no sample is taken of prefills that overlap with one beside
which such prompts ran.
"""

from typing import Final

from tandem_planner.prefill_fit import PrefillSample, prefill_sample

SAMPLE_TOKENS: Final = 8192
"""Tokens of a sample from a period that goes on: what other prompts in the batch had computed at
both of its ends is small beside them."""


class BusyPeriod:
    """Prefills of one engine that overlap."""

    def __init__(self) -> None:
        self._prompts: list[tuple[float, float]] = []
        self._start = self._end = 0.0
        self._tokens = 0.0
        self._is_cut = False
        """Whether the period began in the middle of a busy one: a short one says little."""
        self._is_known = True
        """Whether all prompts that ran in the period are in it."""

    def add(
        self,
        start: float,
        end: float,
        uncached: float,
        cached: float,
        *,
        is_last: bool,
        is_known: bool = True,
    ) -> list[PrefillSample]:
        """A prefill ran from `start` to `end`; `is_last`: no other one is under way; `is_known`:
        no prompt ran beside it that is not added here. Returns the samples that are complete
        now."""
        samples = []
        if self._prompts and start >= self._end:
            samples += self._close()
            self._is_cut = False
        elif not self._prompts:
            # What ran before `_end` belongs to the sample before.
            self._is_cut = start < self._end
        if not self._prompts:
            self._start = max(start, self._end)
        self._is_known = self._is_known and is_known
        self._prompts.append((uncached, cached))
        self._tokens += uncached
        self._end = max(end, self._end)
        if is_last or self._tokens >= SAMPLE_TOKENS:
            samples += self._close()
        return samples

    def _close(self) -> list[PrefillSample]:
        sample = prefill_sample(self._prompts, self._end - self._start)
        is_long = not self._is_cut or self._tokens >= SAMPLE_TOKENS
        is_usable = sample.seconds > 0 and is_long and self._is_known
        self._prompts, self._tokens, self._is_known = [], 0.0, True
        return [sample] if is_usable else []
