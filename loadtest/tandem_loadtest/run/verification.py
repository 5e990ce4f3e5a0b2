"""Records whose answers await their comparison with the reference's, in the parent process."""

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from ..records import Outcome, Record
from .options import BenchProgress
from .protocol import Verdict

MOST_REASONS: Final = 3
"""Reasons of a reference that did not answer in a warning."""


class Verification:
    """Holds records until their verdict, and then passes them on."""

    def __init__(self, on_record: Callable[[Record], None]) -> None:
        self._on_record = on_record
        self._waiting: dict[tuple[int, int], Record] = {}
        """Index and turn → record."""
        self._held = 0
        self._outcomes: Counter[Outcome] = Counter()
        """Of records with a verdict."""
        self._unanswered: Counter[str] = Counter()
        """Why the reference did not answer → answers that were not compared."""

    @property
    def progress(self) -> BenchProgress:
        """How many answers were compared."""
        return BenchProgress(
            phase="reference",
            scheduled=self._held,
            finished=self._held - len(self._waiting),
            outcomes={outcome.value: count for outcome, count in self._outcomes.items()},
        )

    def hold(self, record: Record) -> None:
        """Keep an `ok` record until its verdict."""
        self._waiting[record.index, record.turn] = record
        self._held += 1

    def take(self, verdict: Verdict) -> None:
        """Pass on the record with the outcome that the reference gives it."""
        record = self._waiting.pop((verdict.index, verdict.turn))
        if verdict.outcome is None:
            self._unanswered[verdict.error] += 1
        else:
            record = msgspec.structs.replace(record, outcome=verdict.outcome, error=verdict.error)
        self._outcomes[record.outcome] += 1
        self._on_record(record)

    def finish(self, *, stopped: bool) -> list[str]:
        """Pass on what has no verdict, as it is. Returns warnings of what was not compared."""
        warnings = []
        if self._unanswered:
            reasons = "; ".join(
                f"{count} × {reason}"
                for reason, count in self._unanswered.most_common(MOST_REASONS)
            )
            warnings.append(
                f"{self._unanswered.total()} answers were not compared with the reference's, "
                f"because it did not answer: {reasons}"
            )
        if self._waiting:
            reason = "the run was stopped" if stopped else "a worker process died"
            warnings.append(
                f"{len(self._waiting)} answers were not compared with the reference's: {reason}"
            )
        for record in self._waiting.values():
            self._on_record(record)
        self._waiting.clear()
        return warnings
