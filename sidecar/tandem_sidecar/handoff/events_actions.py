"""Events that happen to a hand-off, its states, and actions that the driver performs: what
`machine` works on.

They are msgspec Structs because each request creates about a dozen of them and frozen dataclasses
take several times as long to create.

Errors: `IllegalStep`: an event that cannot happen in this state, which is a bug in the driver.
"""

from enum import StrEnum
from math import inf

import msgspec

from tandem_contract.paths import ErrorPhase, RoutingPath

from ..connectors.protocol import KvHold
from ..observability.record import Outcome
from ..settings import Policy


class IllegalStep(RuntimeError):
    """An event that cannot happen in the current state."""


class Cause(StrEnum):
    """Why a prefill attempt failed although the client's request is valid."""

    UNREACHABLE = "unreachable"
    """The connection was refused, not made in time, or lost."""
    ERROR = "error"
    """5xx, or an answer that is not HTTP."""
    BUSY = "busy"
    """429 or 503."""
    SILENT = "silent"
    """The engine sent no byte and failed its health check. The leg is still in flight."""
    DEADLINE = "deadline"
    """The time for all attempts together is used up. The leg is still in flight."""
    CIRCUIT_OPEN = "circuit_open"
    """Not sent: the pod's circuit breaker is open, or its Retry-After has not passed."""


# Events, reported by the driver.


class PrefillSent(msgspec.Struct, frozen=True, gc=False):
    """The prefill leg was sent, and the decode leg does not have to wait for its answer."""

    kv_hold: KvHold


class PrefillAnswered(msgspec.Struct, frozen=True, gc=False):
    """2xx with usable transfer parameters."""

    kv_hold: KvHold


class PrefillUnusable(msgspec.Struct, frozen=True, gc=False):
    """2xx that names no KV which a decode engine could read."""

    detail: str


class PrefillRejected(msgspec.Struct, frozen=True, gc=False):
    """4xx other than 429. It is a verdict on the leg, which is not the client's request: only the
    decode engine's answer tells whether that is valid."""

    detail: str


class PrefillFailed(msgspec.Struct, frozen=True, gc=False):
    """The attempt failed for a reason in the pod or on the way to it."""

    cause: Cause
    detail: str
    """For the client's error and the log; contains no prompt text."""
    retry_after: float = 0.0
    """Seconds until the pod may be sent requests again; for BUSY and CIRCUIT_OPEN."""
    may_exhaust: bool = False
    """The prompt's text is so long that it may itself be the reason; for SILENT and DEADLINE."""


class DecodeAdmitted(msgspec.Struct, frozen=True, gc=False):
    """The decode engine sent a 2xx head: it owns the request and will read the KV itself."""


class DecodeRefused(msgspec.Struct, frozen=True, gc=False):
    """4xx: the request is invalid, or there are too many requests (429)."""

    kv_released: bool
    """Whether the refusal made the engine release the KV."""


class DecodeErrored(msgspec.Struct, frozen=True, gc=False):
    """5xx, or a stream that has an error in place of its first token, before a byte was sent to the
    client."""

    busy: bool = False
    """503: the engine takes no more requests, so sending another leg would not help."""
    error: "SendError | None" = None
    """What to send in place of the stream that has the error; None: forward the engine's answer."""


class DecodeStarted(msgspec.Struct, frozen=True, gc=False):
    """An answer that can be forwarded has begun: a stream with its first token."""


class DecodeLost(msgspec.Struct, frozen=True, gc=False):
    """Connection refused, or lost before the end of the answer, or the engine hangs."""

    detail: str
    engine_may_be_healthy: bool = False
    """The failure says nothing about the engine: a pooled connection was closed, pushed KV never
    arrived, or a stream broke off before its first token. The prompt can be computed there."""


class DecodeEnded(msgspec.Struct, frozen=True, gc=False):
    """The last byte of the answer arrived."""


class DecodeTakenOver(msgspec.Struct, frozen=True, gc=False):
    """Another decode engine serves the request from now on, and answers the client."""


class ClientDisconnected(msgspec.Struct, frozen=True, gc=False):
    """The client closed its connection."""


class DrainExpired(msgspec.Struct, frozen=True, gc=False):
    """The drain timeout passed while this request was still running."""


PrefillEvent = PrefillSent | PrefillAnswered | PrefillUnusable | PrefillRejected | PrefillFailed
DecodeEvent = (
    DecodeAdmitted | DecodeRefused | DecodeErrored | DecodeStarted | DecodeLost | DecodeEnded
)
Event = PrefillEvent | DecodeEvent | DecodeTakenOver | ClientDisconnected | DrainExpired

# States. `path` is the routing path that the answer reports if the request ends in this state.


class Prefilling(msgspec.Struct, frozen=True, gc=False):
    """A prefill attempt is in flight, and no decode leg."""

    policy: Policy
    candidates: int
    max_attempts: int
    """Attempts that may be sent. A candidate with an open circuit breaker is skipped and does not
    count."""
    attempt: int = 0
    failures: int = 0
    earliest_retry: float = inf
    """Seconds until the first of the skipped candidates may be sent requests again."""
    path: RoutingPath = RoutingPath.PREFILL_THEN_DECODE
    has_left: bool = False
    """Whether the first candidate is the pod that the stream left, besides those for prefill."""


class BothLegs(msgspec.Struct, frozen=True, gc=False):
    """Both legs are in flight; nothing of the decode answer is sent before the prefill's 2xx."""

    prefilling: Prefilling
    kv_hold: KvHold
    admitted: bool = False
    started: bool = False
    """Bytes of the decode answer have arrived and wait."""
    path: RoutingPath = RoutingPath.PREFILL_THEN_DECODE


class Decoding(msgspec.Struct, frozen=True, gc=False):
    """The decode leg is in flight, and nothing was sent to the client yet."""

    policy: Policy
    path: RoutingPath
    kv_hold: KvHold | None = None
    admitted: bool = False
    prefill_refused: bool = False
    """The prefill pod answered the leg with a 4xx. If this engine serves the request, the fault was
    the pod's or the leg's."""


class Answering(msgspec.Struct, frozen=True, gc=False):
    """The decode engine's answer is being sent to the client."""

    path: RoutingPath


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The request is over; further events change nothing."""

    path: RoutingPath
    outcome: Outcome


Running = Prefilling | BothLegs | Decoding | Answering
State = Running | Ended

# Actions, performed by the driver in the order given.


class StartPrefill(msgspec.Struct, frozen=True, gc=False):
    """Send the prefill leg to a candidate."""

    candidate: int
    """Index into the request's prefill candidates."""
    last: bool
    """No other candidate remains, so this attempt may use all the time that is left."""


class StartDecode(msgspec.Struct, frozen=True, gc=False):
    """Send the decode leg to this pod's engine."""

    kv_hold: KvHold | None
    """The KV to read; None: the engine computes the prompt itself."""


class AbortPrefill(msgspec.Struct, frozen=True, gc=False):
    """Abort the attempt in flight; KV that its answer still hands over is released."""


class AbortDecode(msgspec.Struct, frozen=True, gc=False):
    """Close the connection, so that the engine aborts the request."""


class ReleaseKv(msgspec.Struct, frozen=True, gc=False):
    """Make the prefill pod free blocks that will not be read."""

    kv_hold: KvHold


class ForwardDecodeAnswer(msgspec.Struct, frozen=True, gc=False):
    """Send the decode engine's answer to the client, from the bytes that already arrived on."""

    decode_failed: bool = False
    """It is an error for which another decode engine may serve the request instead."""


class SendError(msgspec.Struct, frozen=True, gc=False):
    """Answer the client with an error of the sidecar."""

    status: int
    message: str
    retry_after: int = 1
    """Seconds, for the Retry-After header of a 503."""
    decode_failed: bool = False
    """As of `ForwardDecodeAnswer`."""
    may_exhaust: bool = False
    """As of `PrefillFailed`: the client is not to send it again."""


class CutAnswer(msgspec.Struct, frozen=True, gc=False):
    """End a started answer so that the client cannot mistake it for complete."""

    status: int
    message: str
    decode_failed: bool = False
    """As of `ForwardDecodeAnswer`."""


class CountError(msgspec.Struct, frozen=True, gc=False):
    """Count a failure in the metrics and the request's record."""

    phase: ErrorPhase


Action = (
    StartPrefill
    | StartDecode
    | AbortPrefill
    | AbortDecode
    | ReleaseKv
    | ForwardDecodeAnswer
    | SendError
    | CutAnswer
    | CountError
)
