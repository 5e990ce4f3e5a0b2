"""Times of a Mooncake trace as if they had not been rounded. Pure."""

from random import Random
from typing import Final

import msgspec

ROUNDED_MS: Final = 3000
"""Milliseconds to which Mooncake's traces round their times: 10 requests share one on average."""


def spread(lines: bytes, rounded: float, random: Random) -> bytes:
    """The trace `lines` (JSON lines) with each request up to `rounded` milliseconds later, drawn
    from `random` with equal probability."""
    requests = [msgspec.json.decode(line) for line in lines.splitlines() if line.strip()]
    for request in requests:
        request["timestamp"] += random.uniform(0, rounded)
    return b"\n".join(map(msgspec.json.encode, requests))
