"""Numbers as a person reads them: three significant digits and a unit."""

from typing import Final

_SPACE: Final = "\N{NO-BREAK SPACE}"
ABSENT: Final = "–"
"""Stands for a value that does not exist."""


def seconds(value: float | None) -> str:
    """`482 ms`, `1.23 s`, `0.85 ms`; `ABSENT` for None."""
    if value is None:
        return ABSENT
    large = abs(value) >= 1
    return f"{number(value if large else value * 1000)}{_SPACE}{'s' if large else 'ms'}"


def number(value: float) -> str:
    """At least three significant digits, thousands separated: `1,234`, `12.3`, `0.0123`."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if 1 <= abs(value) < 10 else f"{value:.3g}"


def share(value: float | None) -> str:
    """A share from 0 to 1 as a percentage; `ABSENT` for None.

    Only 0 and 1 themselves become 0 % and 100 %, so that one loss among a million shows.
    """
    if value is None:
        return ABSENT
    percent = 100 * value
    if 0 < percent < 0.1:
        return f"<{_SPACE}0.1{_SPACE}%"
    if 99.9 < percent < 100:
        return f">{_SPACE}99.9{_SPACE}%"
    return f"{percent:.1f}".removesuffix(".0") + f"{_SPACE}%"


def quantity(value: float, unit: str) -> str:
    """A figure of a report's summary, by its unit."""
    match unit:
        case "s":
            return seconds(value)
        case "share":
            return share(value)
    return f"{number(value)}{_SPACE}{unit}" if unit else number(value)


def fraction(part: int, whole: int) -> str:
    """`3 of 1,200 (0.3 %)`."""
    return f"{part:,} of {whole:,} ({share(part / whole if whole else None)})"
