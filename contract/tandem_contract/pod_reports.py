"""What an EPP knows and estimates of its pods: the JSON of `endpoints.DEBUG_PODS`.

    GET /debug/pods     on the EPP's metrics port: list of PodReport

The EPP writes it, people and `tandem doctor` read it. All durations are in seconds.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Source(StrEnum):
    """Where the figures of an estimate come from."""

    PRIOR = "prior"
    """Assumed: nothing was measured, neither on this pod nor on an alike one."""
    ALIKE = "alike"
    """Taken over from pods of the same role, models and compat hash."""
    LEARNED = "learned"
    """Measured on this pod, or on an alike one that its samples do not tell apart (`own`)."""


class Estimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fit of a pod."""

    source: Source
    samples: int = 0
    """Measurements of this pod in the fit."""
    age: float | None = None
    """Seconds since the newest measurement; None without one."""
    figures: Mapping[str, float] = {}
    """Name with its unit → value: those that the choice is made from."""
    own: Mapping[str, float] = {}
    """The same figures by this pod's samples alone, where the choice uses those of alike pods
    because samples do not tell the pods apart; else empty."""


class Reporter(StrEnum):
    """Who tells how much of the prompts was cached."""

    EPP = "epp"
    """The EPP's prefix index, when it chose the pod."""
    ENGINE = "engine"
    """The engine's counters of prompt tokens: all its prompts, streams too."""
    ANSWERS = "answers"
    """The `usage` of answers whose headers come after it, for an engine without such counters."""


class HitReport(msgspec.Struct, frozen=True):
    """Cached share of the prompts that a pod computed lately."""

    ratio: float
    """0 to 1, of all their tokens."""
    prompt_tokens: float
    """Tokens of these prompts; those before the latest million count less."""
    reported_by: Reporter


class PodReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One pod, as one EPP sees it."""

    name: str
    address: str
    role: str
    models: tuple[str, ...] = ()
    ready: bool = True
    """Whether discovery and scrapes let the EPP choose it."""
    health: str = ""
    """State by the outcomes of its requests, one word."""
    failure_rate: float = 0.0
    """Decaying share of failed requests, 0 to 1."""
    in_flight: int = 0
    """Requests that this EPP had placed there and that have not ended."""
    running: float | None = None
    """Requests that the engine runs, by its metrics; None: not scraped yet."""
    waiting: float | None = None
    """Requests in the engine's queue, by its metrics; None: not scraped yet."""
    kv_usage: float | None = None
    """Used share of the engine's KV cache, 0 to 1; None: not scraped yet."""
    wait: float | None = None
    """Predicted wait of a request that came now; None: no cost is predicted."""
    estimates: Mapping[str, Estimate] = {}
    """`prefill`, `decode`, `transfer`: the fits that the cost is computed from. `transfer` is that
    of all transfers; `transfer_same_node` and so on, one for each fabric class (`fabric_classes`)
    of which something is measured, are those of the class."""
    node: str = ""
    """The machine that it runs on; empty: not known."""
    domain: str = ""
    """The fabric domain of that machine; empty: not known."""
    hits: Mapping[str, HitReport] = {}
    """`estimated`: as the choices predicted it; `measured`. Absent before the first prompt."""


PREFILL_RATE = "tokens_per_second"
"""Figure of the estimate `prefill`: its rate for a prompt of `PREFILL_TOKENS` uncached tokens."""
PREFILL_TOKENS = 1000
TRANSFER_RATE = "gigabytes_per_second"
"""Figure of the estimates of transfers; absent while transfers were too small to tell a rate."""
TRANSFER_SECONDS = "seconds_per_transfer"
"""Figure of the estimates of transfers: seconds of one that moves nothing."""
TRANSFER_EXPOSED = "exposed_share"
"""Figure of the estimate `transfer`: the share that a first token waits for; absent while it is all
of it, as in hand-offs that are not streamed."""
KV_BYTES = "kv_bytes_per_token"
"""Figure of the estimates of transfers; absent before the first one."""


__all__ = [
    "KV_BYTES",
    "PREFILL_RATE",
    "PREFILL_TOKENS",
    "TRANSFER_EXPOSED",
    "TRANSFER_RATE",
    "TRANSFER_SECONDS",
    "Estimate",
    "HitReport",
    "PodReport",
    "Reporter",
    "Source",
]
