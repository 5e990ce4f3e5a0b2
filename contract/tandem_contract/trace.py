"""The record of one request that each component keeps: the JSON behind `tandem trace`.

    GET endpoints.REQUESTS + ID     on the sidecar's admin port: list of SidecarTrace
                                    on the EPP's metrics port: list of DecisionTrace

Clients may reuse an id, so the answer is a list, newest last. An empty list with status 404 means
that the id is unknown or its record has been evicted. Records hold names, ids and numbers; they
never hold prompt text or header values.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from .endpoints import REQUESTS
from .paths import RoutingPath
from .timing import Timing

GPU_HOT: Final = "GpuHot"
"""Tier of KV in a pod's own memory: on the GPU, or in host memory beside it."""
STORAGE_WARM: Final = "StorageWarm"
"""Tier of KV in the pods' external storage."""
MAX_SAME_ID: Final = 8
"""Maximum number of requests with the same id in an answer; older ones are left out."""


class LegTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request to an engine; times are seconds after the client's request was received."""

    phase: str
    """`prefill`, `decode` or `release`."""
    backend: str
    engine_id: str
    """Request id of this attempt, as it appears in the engine's log."""
    started: float
    first_byte: float | None = None
    """When the engine's answer began; a stream begins with a token."""
    ended: float | None = None
    result: str | None = None
    """How the leg ended, one word; None while it runs."""
    status: int | None = None
    """HTTP status of the engine's answer."""
    detail: str = ""
    """Description of a failure."""
    timing: Timing | None = None
    """The times and token counts that the engine reported for this leg; None if it sent none."""
    streamed: bool = False
    """Whether it is a decode leg that reads KV while the prefill computes it."""


class MoveTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request was given to another engine, or ended because none could go on with it."""

    at: float
    """When, in seconds after the client's request was received."""
    cause: str
    """Why it left its engine, one word."""
    method: str
    """How the next engine goes on, one word."""
    result: str | None = None
    """How that ended, one word; None while the engine has sent nothing."""
    source: str = ""
    """The backend that it left; empty: it was at none yet."""
    target: str = ""
    """The backend that it was given to; empty: none."""
    delivered: int = 0
    """Tokens of the answer that the client had."""
    seam: int = 0
    """Of these, how many come before the first one that the next engine generates."""
    recomputed: int = 0
    """Tokens that the next engine was given to compute once more."""
    gap: float | None = None
    """Seconds from the last bytes that the client had to the next; None: there are none."""
    why: str = ""
    """Why no other engine goes on."""


class SidecarTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request on its decode pod; times are seconds after it was received."""

    request_id: str
    kind: str
    """A `RequestKind`, or `passthrough`."""
    target: str
    """Request path without the query string."""
    received: float
    """Unix seconds."""
    path: RoutingPath | None = None
    """The routing path taken; None for a request that passed through."""
    reason: str = ""
    """Why this path, one word."""
    outcome: str = ""
    """How the request ended, one word; empty while it runs."""
    status: int | None = None
    """HTTP status sent to the client."""
    first_byte: float | None = None
    """When the first byte was sent to the client."""
    ended: float | None = None
    legs: tuple[LegTrace, ...] = ()
    moves: tuple[MoveTrace, ...] = ()
    """From one engine to another."""
    timing: Timing | None = None
    """What the router was told of the request's prompt, completed by the usage at the end of a
    stream; None before an answer came."""


class CandidateTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chosen or alternative backend, as the EPP knew it at the decision."""

    name: str
    address: str
    in_flight: int = 0
    """Requests that this EPP had placed there and that had not ended."""
    waiting: float | None = None
    """Requests in the engine's queue by its metrics; None: not scraped yet."""
    kv_usage: float | None = None
    """Used share of the engine's KV cache, 0 to 1; None: not scraped yet."""


class CostTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The predicted cost of giving one candidate a part of the request."""

    pod: str
    part: str
    """`unified`: the whole request; `prefill` or `decode`: its part of a split, whose cost is the
    sum of both."""
    cost: float
    """Seconds: the sum of the terms."""
    terms: Mapping[str, float] = {}
    """Term → seconds, those that are not 0; `tandem_planner.cost` defines them."""
    cached_tokens: int = 0
    """Prompt tokens believed to be cached there."""
    chosen: bool = False
    fabric: str = ""
    """Of the part `decode`: the fabric class of the pairs that have this cost, a word of
    `fabric_classes`. Empty if it is not known of any pod where it runs, or all are far apart."""


class DecisionTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where one request was sent, and why."""

    request_id: str
    decided: float
    """Unix seconds."""
    decision_seconds: float
    """From the complete body to the decision, without `held`."""
    held: float = 0.0
    """Seconds that it waited before in flow control, because no pod had room."""
    model: str = ""
    """Model that serves the request; empty when it names none."""
    asked: str = ""
    """Model that the client named, where another one serves the request."""
    priority: int = 0
    """That of the InferenceObjective that the request names."""
    path: RoutingPath | None = None
    """The intended path; None when the request was refused."""
    reason: str = ""
    """Why this path or refusal, one word."""
    decode: tuple[CandidateTrace, ...] = ()
    """The chosen decode pod, then the alternatives in order."""
    prefill: tuple[CandidateTrace, ...] = ()
    """The chosen prefill pod, then the retry candidates; empty without a split."""
    prompt_tokens: int = 0
    """Estimated length of the prompt."""
    cached_tokens: int = 0
    """Estimated number of prompt tokens cached on the decode pod."""
    loaded_tokens: int = 0
    """Estimated number of prompt tokens that the pod that computes the prompt loads from external
    storage."""
    tier: str = ""
    """The slowest tier that KV of the prompt comes from: GPU_HOT or STORAGE_WARM; empty: no tier
    is known to have any."""
    status: int | None = None
    """HTTP status of the answer; None before its headers arrive."""
    timing: Timing | None = None
    """The times and token counts that the sidecar sent with the response headers."""
    ended: float | None = None
    """Seconds after the decision; None while the request runs."""
    costs: tuple[CostTrace, ...] = ()
    """Predicted costs of all candidates, the cheapest of each part first. Empty if no cost was
    predicted, or if the decision is not among the latest ones."""
    predicted_ttft: float | None = None
    """Predicted seconds from the decision to the first token."""
    measured_ttft: float | None = None
    """Measured seconds from the decision to the first token; None if the answer was no stream."""
    overhead: float = 0.0
    """The part of `predicted_ttft` that is no term of `costs`: what first tokens on this path took
    lately beyond them (HTTP, proxies, the first decode step), in seconds."""
    served: str = ""
    """Address of the pod that served the request, if the gateway tells."""
    predicted_itl: float | None = None
    """Predicted seconds between two tokens, with the decodes that ran at the decision; None: no
    cost was predicted."""


def kv_tier(cached_tokens: int, loaded_tokens: int) -> str:
    """The tier of a decision for a prompt of which `cached_tokens` are on the decode pod and
    `loaded_tokens` are loaded from external storage."""
    if loaded_tokens:
        return STORAGE_WARM
    return GPU_HOT if cached_tokens else ""


def trace_path(request_id: str) -> str:
    """Path of the trace of `request_id`, percent-encoded: an id may contain any character."""
    return REQUESTS + quote(request_id, safe="")


__all__ = [
    "GPU_HOT",
    "MAX_SAME_ID",
    "STORAGE_WARM",
    "CandidateTrace",
    "CostTrace",
    "DecisionTrace",
    "LegTrace",
    "MoveTrace",
    "SidecarTrace",
    "kv_tier",
    "trace_path",
]
