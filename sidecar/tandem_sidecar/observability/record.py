"""The record of one request: filled in by the data path, read by metrics, history, log and spans.

    record = Record(request_id, kind, received, received_unix)
    leg = record.leg(Phase.PREFILL, "prefill-0", attempt_id, now)
    leg.end(Result.ANSWERED, now, status=200)

Times are the event loop's seconds; `received_unix` relates them to the wall clock. A record holds
names, ids and numbers, never prompt text or a secret.

The W3C trace context of a traced request is kept here too: the record hands each leg a
`traceparent` with a span id of its own, so that the engine's spans become children of that leg.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from random import getrandbits
from typing import Final

import msgspec

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_contract.timing import Timing

MAX_TEXT: Final = 256
"""Characters that are kept of a text chosen by a client or an engine."""
PASSTHROUGH: Final = "passthrough"
"""The `kind` of a request that generates nothing and is passed through to the engine."""

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED_FLAG: Final = 1
_TRACE_ID_BITS: Final = 128
_SPAN_ID_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class RemoteParent:
    """The caller's span, as its `traceparent` header names it; ids in hex."""

    trace_id: str
    span_id: str
    sampled: bool
    """Whether the caller records this trace."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that a traced request will get; ids in hex."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    """The caller's span; empty: this span is the first of its trace."""

    def new_traceparent(self) -> str:
        """A `traceparent` value with a new span id in this trace, for one leg."""
        return f"00-{self.trace_id}-{new_span_id()}-01"


def parse_traceparent(value: str) -> RemoteParent | None:
    """The parent that a `traceparent` header names; None when it is malformed.

    W3C Trace Context, level 1: version 00 has exactly four fields; of a later version the first
    four are read and the others ignored. All-zero ids and version ff are invalid. After None a new
    trace begins.
    """
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    if not int(match[2], 16) or not int(match[3], 16):
        return None
    return RemoteParent(match[2], match[3], bool(int(match[4], 16) & _SAMPLED_FLAG))


def span_id_of(traceparent: str) -> str:
    """The span id in a traceparent that `TraceContext.new_traceparent` made."""
    return traceparent.split("-")[2]


def new_trace_id() -> str:
    """A random trace id, 32 hex digits."""
    return _random_id(_TRACE_ID_BITS)


def new_span_id() -> str:
    """A random span id, 16 hex digits."""
    return _random_id(_SPAN_ID_BITS)


def _random_id(bits: int) -> str:
    # Ids need to be unique, not secret: `random` costs no system call, `secrets` would. W3C makes
    # the all-zero id invalid, hence `or 1`.
    return f"{getrandbits(bits) or 1:0{bits // 4}x}"


class Phase(StrEnum):
    """The purpose of a leg."""

    PREFILL = "prefill"
    DECODE = "decode"
    RELEASE = "release"


class Result(StrEnum):
    """How a leg ended; the values are metric labels and part of `/requests/ID`."""

    ANSWERED = "answered"
    """A complete 2xx answer."""
    REJECTED = "rejected"
    """4xx: the engine refused the client's request."""
    BUSY = "busy"
    """429 or 503."""
    ERROR = "error"
    """Another 5xx, a stream that begins with an error event, or an answer that is not HTTP."""
    UNREACHABLE = "unreachable"
    """No connection could be made."""
    LOST = "lost"
    """The connection ended before the answer was complete."""
    DEADLINE = "deadline"
    """The leg's time limit passed."""
    UNUSABLE = "unusable"
    """A 2xx prefill answer without usable kv_transfer_params."""
    SILENT = "silent"
    """The engine hung: no bytes on the leg, and no answer to `/health`; or no token for long."""
    DIFFERED = "differed"
    """It went on with a stream and generated another answer than the engine before it."""
    CIRCUIT_OPEN = "held"
    """Not sent: the circuit breaker of this prefill pod is open."""
    ABORTED = "aborted"
    """Ended by the sidecar: the client left, a drain timed out, or another leg failed."""


class Outcome(StrEnum):
    """How a request ended; every request ends in exactly one of these."""

    ANSWERED = "answered"
    """An engine's answer was sent completely; an engine's error counts as its answer."""
    FAILED = "failed"
    """The sidecar sent an error of its own instead of an answer."""
    CUT = "cut"
    """The answer ended early, in a way that the client can detect."""
    ABANDONED = "abandoned"
    """The client left before the answer was complete."""


class Leg(msgspec.Struct, eq=False, gc=False):
    """One request to an engine."""

    phase: Phase
    backend: str
    """Name or address of the pod."""
    attempt_id: str
    """The request id that the engine was given for this attempt; empty when none was sent."""
    started: float
    first_byte: float | None = None
    """When the answer began; a stream begins with a token."""
    ended: float | None = None
    result: Result | None = None
    """None while the leg runs."""
    status: int | None = None
    """HTTP status of the engine's answer."""
    detail: str = ""
    """Description of the failure; empty if the leg succeeded."""
    timing: Timing | None = None
    """The engine's `x-tandem-timing` of this leg; None before an answer came."""
    streamed: bool = False
    """Whether it is a decode leg that reads KV while the prefill computes it."""
    traceparent: str = ""
    """The header that the engine gets instead of the client's; empty: the request is not traced."""

    def end(
        self, result: Result, now: float, *, status: int | None = None, detail: str = ""
    ) -> None:
        """Record how the leg ended. Later calls change nothing: the first cause counts."""
        if self.result is None:
            self.result, self.ended, self.status, self.detail = result, now, status, detail


class MoveMethod(StrEnum):
    """How another engine goes on with a request; the values are metric labels."""

    CONTINUED = "continued"
    """By token ids, after those that the client has."""
    AGAIN = "again"
    """It generates the answer again; what the client has is compared and removed."""
    BEGUN_AGAIN = "begun_again"
    """The client has nothing yet."""
    NONE = "none"
    """It does not: the answer ends with an error."""


NO_ENGINE: Final = "no further engine may serve the request"
"""`Record.not_resumed` of a request that has no other engine left."""
NOT_PARSED: Final = "the next engine has not said that it parses tokens"
"""Likewise of a chat that is parsed, as its engine drains."""


class Move(msgspec.Struct, eq=False, gc=False):
    """A request was given to another engine. Cause and result follow from the legs: see `moves`."""

    legs: int
    """How many legs the request had before."""
    method: MoveMethod
    delivered: int
    """Tokens of the answer that the client had. Where their ids were not asked for, an event counts
    as one."""
    seam: int
    """Of these, how many come before the first one that the engine generates."""
    prompt: int
    """Tokens of the prompt; 0: not known."""
    last_byte: float | None
    """When the client got the last of them; None: it had nothing."""
    resumed: float | None = None
    """When it got the first bytes after that."""


# `eq=False`: records are members of sets, by identity. `gc=False`: nothing that a record refers to
# refers back to it, so the cycle collector need not look at it.
class Record(msgspec.Struct, eq=False, gc=False):
    """One client request, from its last byte received to the last byte of its answer."""

    request_id: str
    kind: str
    """The API that is used (`completions`, `chat`, …), or `PASSTHROUGH`."""
    received: float
    received_unix: float
    method: str = "POST"
    target: str = ""
    """The path without its query, cut to `MAX_TEXT` characters."""
    traceparent: str = ""
    """The header as the client or the router sent it, cut to `MAX_TEXT` characters; empty: none."""
    reason: str = ""
    """Why this routing path: the signed plan's reason, or the rule that forced one engine."""
    path: RoutingPath | None = None
    """The routing path taken; None for a request that is passed through."""
    outcome: str = ""
    """How the request ended, an `Outcome`; empty while it runs."""
    status: int | None = None
    """The HTTP status that the client got."""
    first_byte: float | None = None
    """When the first byte of the answer was written to the client; a stream begins with a token."""
    ended: float | None = None
    errors: tuple[ErrorPhase, ...] = ()
    """The phase of each failure; a request with failures may still be answered."""
    ignored: int = 0
    """Prefill addresses left out because they are unsigned and outside the allow-list."""
    # msgspec copies an empty list for each Struct, so records do not share it.
    legs: list[Leg] = []
    timing: Timing | None = None
    """How long computing the prompt took and what the usage counts; None before an answer came."""
    trace: TraceContext | None = None
    """The span that this request will get; None: it is not traced."""
    moves: tuple[Move, ...] = ()
    not_resumed: str = ""
    """Why no other engine can go on with the stream; empty: one can, or none is to."""

    def begin_move(
        self,
        method: MoveMethod,
        *,
        delivered: int = 0,
        seam: int = 0,
        prompt: int = 0,
        last_byte: float | None = None,
    ) -> Move:
        """Note that the next leg is another engine's."""
        move = Move(len(self.legs), method, delivered, seam, prompt, last_byte)
        self.moves += (move,)
        return move

    def cut_message(self, problem: str) -> str:
        """The error that ends a stream early because of `problem`."""
        if not self.not_resumed:
            return problem
        return f"{problem}; no other engine can go on: {self.not_resumed}"

    def leg(self, phase: Phase, backend: str, attempt_id: str, now: float) -> Leg:
        """Add a leg that starts now."""
        leg = Leg(phase, backend, attempt_id, now)
        if self.trace is not None:
            leg.traceparent = self.trace.new_traceparent()
        self.legs.append(leg)
        return leg
