"""What can happen to a hand-off, and what can be done about it: the words of `machine`.

Structs rather than frozen dataclasses, which take several times as long to make: each request makes
a dozen of them.
"""

from enum import StrEnum

import msgspec

from tandem_contract.paths import ErrorPhase

from ..connectors.handover import Handover


class Cause(StrEnum):
    """Why a prefill attempt failed without being the client's fault."""

    UNREACHABLE = "unreachable"
    """Connection refused, not made in time, or lost."""
    ERROR = "error"
    """5xx, or an answer that is no HTTP."""
    BUSY = "busy"
    """429 or 503."""
    SILENT = "silent"
    """Neither an answer nor a sign of life: the leg is still out."""
    DEADLINE = "deadline"
    """The time for all attempts together is used up: the leg is still out."""
    HELD = "held"
    """Not asked: it failed too often of late, or asked to be left alone."""


# Events: what the driver saw.


class PrefillSent(msgspec.Struct, frozen=True, gc=False):
    """The prefill leg is out, and the decode leg need not wait for its answer."""

    handover: Handover


class PrefillAnswered(msgspec.Struct, frozen=True, gc=False):
    """2xx with usable kv_transfer_params."""

    handover: Handover


class PrefillUnusable(msgspec.Struct, frozen=True, gc=False):
    """2xx with nothing a decode engine could read."""

    detail: str


class PrefillRejected(msgspec.Struct, frozen=True, gc=False):
    """4xx but 429: the client's fault, another engine would say the same."""


class PrefillFailed(msgspec.Struct, frozen=True, gc=False):
    cause: Cause
    detail: str
    """For the client's error and the log; no prompt text."""
    wait: float = 0.0
    """Seconds until the target may be asked again; of BUSY and HELD."""


class DecodeAdmitted(msgspec.Struct, frozen=True, gc=False):
    """The decode engine's 2xx head came: it holds the request and reads the KV itself."""


class DecodeRefused(msgspec.Struct, frozen=True, gc=False):
    """4xx: the client's fault, or too much at a time (429)."""

    released: bool
    """Whether refusing made the engine have the KV freed."""


class DecodeErrored(msgspec.Struct, frozen=True, gc=False):
    """5xx, or an error as the first event of a stream, before a byte went to the client."""

    busy: bool = False
    """503: the engine takes no more; asking again would not help."""


class DecodeStarted(msgspec.Struct, frozen=True, gc=False):
    """The first bytes of an answer to pass on are there."""


class DecodeLost(msgspec.Struct, frozen=True, gc=False):
    """Connection refused, lost before the answer's end, or without a sign of life."""

    detail: str
    again: bool = False
    """The engine may be well: a kept connection was closed, or KV never came."""


class DecodeEnded(msgspec.Struct, frozen=True, gc=False):
    """The answer's last byte came."""


class ClientLeft(msgspec.Struct, frozen=True, gc=False):
    pass


class DrainExpired(msgspec.Struct, frozen=True, gc=False):
    """The drain timeout passed and this request is still running."""


PrefillEvent = PrefillSent | PrefillAnswered | PrefillUnusable | PrefillRejected | PrefillFailed
DecodeEvent = (
    DecodeAdmitted | DecodeRefused | DecodeErrored | DecodeStarted | DecodeLost | DecodeEnded
)
Event = PrefillEvent | DecodeEvent | ClientLeft | DrainExpired

# Actions: what the driver is to do, in order.


class StartPrefill(msgspec.Struct, frozen=True, gc=False):
    candidate: int
    """Index into the request's candidates."""
    last: bool
    """No other candidate remains: it may use all the time that is left."""


class StartDecode(msgspec.Struct, frozen=True, gc=False):
    handover: Handover | None
    """What to read the KV by; None: the engine computes the prompt itself."""


class AbortPrefill(msgspec.Struct, frozen=True, gc=False):
    """Stop it; what it had already handed over is released."""


class AbortDecode(msgspec.Struct, frozen=True, gc=False):
    """Close the connection: the engine stops."""


class Release(msgspec.Struct, frozen=True, gc=False):
    """Have the prefill pod free blocks that nobody will read."""

    handover: Handover


class PassPrefill(msgspec.Struct, frozen=True, gc=False):
    """Give the client the prefill engine's own answer."""


class PassDecode(msgspec.Struct, frozen=True, gc=False):
    """Give the client the decode engine's answer from here on, and what was held of it."""


class Fail(msgspec.Struct, frozen=True, gc=False):
    """Answer with an error of ours."""

    status: int
    message: str
    retry_after: int = 1
    """Seconds; told with a 503."""


class Cut(msgspec.Struct, frozen=True, gc=False):
    """End a started answer so that nobody takes it for whole."""

    status: int
    message: str


class CountError(msgspec.Struct, frozen=True, gc=False):
    phase: ErrorPhase


Action = (
    StartPrefill
    | StartDecode
    | AbortPrefill
    | AbortDecode
    | Release
    | PassPrefill
    | PassDecode
    | Fail
    | Cut
    | CountError
)
