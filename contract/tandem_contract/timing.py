"""The `x-tandem-timing` header: what is known when response headers go.

    queue=0.0012;compute=0.2310;cached=512;computed=1024;transfer=0.0130;bytes=2097152

An engine writes its own leg; the sidecar joins both legs (prefill's queue and compute, decode's
transfer) for the EPP. Absent figures are left out; unknown names are skipped.
"""

from dataclasses import dataclass
from math import inf
from typing import Final


@dataclass(frozen=True, slots=True)
class Timing:
    """Figures of one request; seconds, tokens, bytes. None is unknown."""

    queue: float | None = None
    """Seconds between admission and the first chunk's start."""
    compute: float | None = None
    """Seconds from the first chunk's start to the first token."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache."""
    computed: int | None = None
    """Prompt tokens computed."""
    transfer: float | None = None
    """Seconds the KV pull took, as the puller measured it."""
    bytes: int | None = None
    """KV bytes pulled."""

    def encode(self) -> str:
        """The header's value; empty when nothing is known."""
        if self is UNKNOWN:
            return ""
        known = ((name, getattr(self, name)) for name in _TYPES)
        return ";".join(
            f"{name}={value:.6f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in known
            if value is not None
        )


UNKNOWN: Final = Timing()
"""What an engine that does not write the header says."""


_TYPES = {
    "queue": float,
    "compute": float,
    "cached": int,
    "computed": int,
    "transfer": float,
    "bytes": int,
}


def parse_timing(value: str) -> Timing:
    """The figures in a header value; one that is malformed, negative or not finite is unknown."""
    if not value:
        return UNKNOWN
    known: dict[str, float | int] = {}
    for part in value.split(";"):
        name, _, text = part.strip().partition("=")
        if name in _TYPES:
            try:
                figure = _TYPES[name](text)
            except ValueError:
                continue
            if 0 <= figure < inf:
                known[name] = figure
    # Names and types come from _TYPES.
    return Timing(**known) if known else UNKNOWN  # type: ignore[arg-type]
