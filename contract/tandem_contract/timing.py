"""The `x-tandem-timing` header: durations and token counts known with the response headers.

    queue=0.0012;compute=0.2310;cached=512;computed=1024;transfer=0.0130;bytes=2097152

An engine reports its own leg. The sidecar joins both legs for the EPP: queue and compute of the
prefill, transfer of the decode. Unknown values are left out, and unknown names are ignored.
"""

from dataclasses import dataclass
from math import inf
from typing import Final


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations in seconds, tokens and bytes of one request; None: unknown."""

    queue: float | None = None
    """Seconds from admission to the start of the first prefill chunk."""
    compute: float | None = None
    """Seconds from the start of the first prefill chunk to the first token."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache."""
    computed: int | None = None
    """Prompt tokens computed."""
    transfer: float | None = None
    """Seconds of the KV transfer, measured by the decode engine."""
    bytes: int | None = None
    """KV bytes transferred."""

    def encode(self) -> str:
        """The header's value; empty when every value is unknown."""
        # The common case for engines that do not send the header: no formatting.
        if self is UNKNOWN:
            return ""
        values = ((name, getattr(self, name)) for name in _TYPES)
        return ";".join(
            f"{name}={value:.6f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values
            if value is not None
        )


UNKNOWN: Final = Timing()
"""The timing of an engine that does not send the header."""


_TYPES = {
    "queue": float,
    "compute": float,
    "cached": int,
    "computed": int,
    "transfer": float,
    "bytes": int,
}


def parse_timing(value: str) -> Timing:
    """The timing in a header value; a malformed, negative or infinite value counts as unknown."""
    if not value:
        return UNKNOWN
    values: dict[str, float | int] = {}
    for part in value.split(";"):
        name, _, text = part.strip().partition("=")
        if name in _TYPES:
            try:
                figure = _TYPES[name](text)
            # One unreadable value must not cost the others: engines may be newer than this code.
            except ValueError:
                continue
            # Also false for NaN, which would spoil every average.
            if 0 <= figure < inf:
                values[name] = figure
    # Names and types come from _TYPES.
    return Timing(**values) if values else UNKNOWN  # type: ignore[arg-type]
