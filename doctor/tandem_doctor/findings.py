"""The result of the checks: findings, each with its fix."""

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How serious a finding is, in ascending order."""

    OK = "ok"
    UNKNOWN = "unknown"
    """Cannot be checked from here."""
    WARNING = "warning"
    """Works, but slower or less safely than it could."""
    BROKEN = "broken"
    """Hand-offs fail, or answers are late."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check of one subject. Its JSON is what `tandem doctor --json` prints."""

    severity: Severity
    check: str
    """Name of the check, as in docs/operate/troubleshooting.md."""
    subject: str
    """Pod, pair of pods, GPU or group."""
    detail: str = msgspec.field(name="seen")
    """The observed values or errors that led to the finding."""
    fix: str = ""
    """The action that solves the problem; empty if nothing has to be done."""


def worst(findings: tuple[Finding, ...]) -> Severity:
    """The highest severity of all findings; OK if there are none."""
    order = list(Severity)
    return max((f.severity for f in findings), key=order.index, default=Severity.OK)
