"""Durations as written in configuration: `250ms`, `30s`, `2m`, `1h`."""

import re
from typing import Final

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PATTERN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)")


class Seconds(float):
    """A duration; text such as `30s` in a custom resource."""


def parse_duration(text: str) -> float:
    """Seconds in `text`.

    >>> parse_duration("1.5s")
    1.5

    Raises ValueError when `text` is not one non-negative number followed by `ms`, `s`, `m` or `h`.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a duration: write a number and a unit, like 250ms, 30s or 2m"
        )
    return float(match[1]) * _UNITS[match[2]]


def format_duration(seconds: float) -> str:
    """`seconds` in the notation of `parse_duration`, in the largest unit that gives an integer."""
    millis = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if millis and millis % size == 0:
            return f"{millis // size}{unit}"
    return f"{millis}ms"
