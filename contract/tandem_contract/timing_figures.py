"""The figures in the text of an `x-tandem-timing` header: their types and limits (`timing`)."""

from math import inf
from typing import Final

MAX_SECONDS: Final = 3600.0
"""Limit of a duration."""
MAX_TOKENS: Final = 1 << 31
"""Limit of a number of tokens."""
MAX_BYTES: Final = 1 << 50
"""Limit of a number of bytes: 1 PiB."""
MAX_REQUESTS: Final = 1 << 20
"""Limit of a number of requests: more connections than one process can have."""

TYPES: Final[dict[str, type[float] | type[int]]] = {
    "queue": float,
    "compute": float,
    "cached": int,
    "computed": int,
    "transfer": float,
    "bytes": int,
    "leg": float,
    "prompt": int,
    "generated": int,
    "inflight": int,
    "streamed": int,
    "waited": float,
}
_LIMITS: Final[dict[str, float]] = {
    name: MAX_SECONDS if kind is float else MAX_TOKENS for name, kind in TYPES.items()
} | {"bytes": MAX_BYTES, "inflight": MAX_REQUESTS, "streamed": 1}
_READERS: Final = {name: (kind, _LIMITS[name]) for name, kind in TYPES.items()}
"""Name → type and limit of the figure."""
_TEMPLATES: Final = tuple(
    f"{name}=%.6f" if kind is float else f"{name}=%d" for name, kind in TYPES.items()
)


def write_figures(figures: tuple[float | int | None, ...]) -> str:
    """The text of figures, given in the order of `TYPES`; None: unknown, and left out."""
    return ";".join([_TEMPLATES[n] % f for n, f in enumerate(figures) if f is not None])


def read_figures(value: str) -> dict[str, float | int] | None:
    """Name → figure; unknown names and malformed or negative figures are left out. None: a figure
    is beyond its limit."""
    figures: dict[str, float | int] = {}
    for part in value.split(";"):
        name, _, text = part.strip().partition("=")
        if (reader := _READERS.get(name)) is None:
            continue
        kind, limit = reader
        try:
            figure = kind(text)
        # One unreadable value must not cost the others: engines may be newer than this code.
        except ValueError:
            continue
        # Both comparisons are false for NaN, which would spoil every average.
        if 0 <= figure <= limit:
            figures[name] = figure
        elif limit < figure < inf:
            return None
    return figures
