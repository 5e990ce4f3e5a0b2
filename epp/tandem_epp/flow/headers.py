"""What a request's headers say about its wait."""

from collections.abc import Mapping
from math import inf

from tandem_contract import headers as wire
from tandem_contract.go_flags import parse_duration


def shorter_ttl(headers: Mapping[str, str], ttl: float) -> float:
    """Seconds that the request may wait: `ttl`, or the less that it asks for."""
    try:
        asked = parse_duration(headers.get(wire.QUEUE_TTL, ""))
    except ValueError:
        return ttl
    return min(ttl, asked) if asked > 0 else ttl


def ttft_target(headers: Mapping[str, str]) -> float:
    """Seconds until the first token that the request asks for; infinite: it asks for none."""
    for name in wire.TTFT_TARGETS:
        if text := headers.get(name):
            try:
                milliseconds = int(text)
            except ValueError:
                return inf
            return milliseconds / 1000.0 if milliseconds >= 0 else inf
    return inf
