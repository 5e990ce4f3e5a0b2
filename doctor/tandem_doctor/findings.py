"""What the doctor says: each finding with its fix."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much it matters."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Not seen from here."""
    WARNING = "warning"
    """Works, but slower or less safely than it might."""
    BROKEN = "broken"
    """Hand-offs fail, or answers are late."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Severity
    check: str
    """Which rule: a word."""
    subject: str
    """Pod, or pair of pods."""
    seen: str
    fix: str = ""
    """What to do; empty when nothing is to be done."""


def worst(findings: tuple[Finding, ...]) -> Severity:
    """The gravest severity of all; OK of none."""
    order = list(Severity)
    return max((f.severity for f in findings), key=order.index, default=Severity.OK)
