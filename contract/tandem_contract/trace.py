"""What a component remembers of one request: the JSON behind `tandem trace`.

    GET endpoints.REQUESTS + ID     on the sidecar's admin port: list of SidecarTrace
                                    on the EPP's metrics port: list of DecisionTrace

The newest stands last: clients reuse ids. A list without an element, with status 404, says that
nothing is known of the id, or no more. Names, ids and figures only: no prompt, no header.
"""

from typing import Final
from urllib.parse import quote

import msgspec

from .endpoints import REQUESTS
from .paths import RoutingPath
from .timing import Timing

MAX_SAME_ID: Final = 8
"""Requests of one id that an answer lists at most; older ones are left out."""


class LegTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to an engine; times are seconds after the request came in."""

    phase: str
    """`prefill`, `decode` or `release`."""
    backend: str
    engine_id: str
    """The attempt's id, as the engine's own log has it."""
    started: float
    first_byte: float | None = None
    ended: float | None = None
    result: str | None = None
    """How it ended, one word; None while it runs."""
    status: int | None = None
    """HTTP status of the engine's answer."""
    detail: str = ""
    """Of a failure."""
    timing: Timing | None = None
    """What the engine said of this leg."""


class SidecarTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one request on its decode pod; times are seconds after it came in."""

    request_id: str
    kind: str
    """What it generates, or `passthrough`."""
    target: str
    """The path asked for, without its query."""
    received: float
    """Unix seconds."""
    path: RoutingPath | None = None
    """The path taken; None for what is passed through."""
    reason: str = ""
    """Why this path, one word."""
    outcome: str = ""
    """How it ended, one word; empty while it runs."""
    status: int | None = None
    """What the client was told."""
    first_byte: float | None = None
    """When the client got the first byte."""
    ended: float | None = None
    legs: tuple[LegTrace, ...] = ()


class CandidateTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A backend that was chosen or may stand in, as the EPP knew it then."""

    name: str
    address: str
    in_flight: int = 0
    """Requests that this EPP had placed there and that had not ended."""
    waiting: float | None = None
    """Requests in its queue by its own account; None: it had not been scraped."""
    kv_usage: float | None = None
    """Share of its KV cache in use, 0 to 1; None likewise."""


class DecisionTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one request was sent, and why."""

    request_id: str
    decided: float
    """Unix seconds."""
    decision_seconds: float
    model: str = ""
    """As asked for; empty when the request names none."""
    path: RoutingPath | None = None
    """The path wanted; None when the request was refused."""
    reason: str = ""
    """Why this path or refusal, one word."""
    decode: tuple[CandidateTrace, ...] = ()
    """The choice, then those that may stand in."""
    prefill: tuple[CandidateTrace, ...] = ()
    """The choice, then the retries; empty without a split."""
    prompt_tokens: int = 0
    """Estimated."""
    cached_tokens: int = 0
    """Of them, those believed to be on the decode pod."""
    status: int | None = None
    """What the answer's head said; None while there is none."""
    timing: Timing | None = None
    """What the sidecar reported with the answer's head."""
    ended: float | None = None
    """Seconds after the decision; None while it runs."""


def trace_path(request_id: str) -> str:
    """The path to ask for `request_id`: ids may hold what a path may not."""
    return REQUESTS + quote(request_id, safe="")


__all__ = [
    "MAX_SAME_ID",
    "CandidateTrace",
    "DecisionTrace",
    "LegTrace",
    "SidecarTrace",
    "trace_path",
]
