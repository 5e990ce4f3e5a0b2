"""What can happen to a hand-off, and what can be done about it: the words of `machine`."""

from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class PrefillSent:
    """The prefill leg is out, and the decode leg need not wait for its answer."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class PrefillAnswered:
    """2xx with usable kv_transfer_params."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class PrefillUnusable:
    """2xx with nothing a decode engine could read."""

    detail: str


@dataclass(frozen=True, slots=True)
class PrefillRejected:
    """4xx but 429: the client's fault, another engine would say the same."""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    cause: Cause
    detail: str
    """For the client's error and the log; no prompt text."""
    wait: float = 0.0
    """Seconds until the target may be asked again; of BUSY and HELD."""


@dataclass(frozen=True, slots=True)
class DecodeAdmitted:
    """The decode engine's 2xx head came: it holds the request and reads the KV itself."""


@dataclass(frozen=True, slots=True)
class DecodeRefused:
    """4xx: the client's fault, or too much at a time (429)."""

    released: bool
    """Whether refusing made the engine have the KV freed."""


@dataclass(frozen=True, slots=True)
class DecodeErrored:
    """5xx, or an error as the first event of a stream, before a byte went to the client."""

    busy: bool = False
    """503: the engine takes no more; asking again would not help."""


@dataclass(frozen=True, slots=True)
class DecodeStarted:
    """The first bytes of an answer to pass on are there."""


@dataclass(frozen=True, slots=True)
class DecodeLost:
    """Connection refused, lost before the answer's end, or without a sign of life."""

    detail: str


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The answer's last byte came."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    pass


@dataclass(frozen=True, slots=True)
class DrainExpired:
    """The drain timeout passed and this request is still running."""


PrefillEvent = PrefillSent | PrefillAnswered | PrefillUnusable | PrefillRejected | PrefillFailed
DecodeEvent = (
    DecodeAdmitted | DecodeRefused | DecodeErrored | DecodeStarted | DecodeLost | DecodeEnded
)
Event = PrefillEvent | DecodeEvent | ClientLeft | DrainExpired

# Actions: what the driver is to do, in order.


@dataclass(frozen=True, slots=True)
class StartPrefill:
    candidate: int
    """Index into the request's candidates."""
    last: bool
    """No other candidate remains: it may use all the time that is left."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    handover: Handover | None
    """What to read the KV by; None: the engine computes the prompt itself."""


@dataclass(frozen=True, slots=True)
class AbortPrefill:
    """Stop it; what it had already handed over is released."""


@dataclass(frozen=True, slots=True)
class AbortDecode:
    """Close the connection: the engine stops."""


@dataclass(frozen=True, slots=True)
class Release:
    """Have the prefill pod free blocks that nobody will read."""

    handover: Handover


@dataclass(frozen=True, slots=True)
class PassPrefill:
    """Give the client the prefill engine's own answer."""


@dataclass(frozen=True, slots=True)
class PassDecode:
    """Give the client the decode engine's answer from here on, and what was held of it."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer with an error of ours."""

    status: int
    message: str
    retry_after: int = 1
    """Seconds; told with a 503."""


@dataclass(frozen=True, slots=True)
class Cut:
    """End a started answer so that nobody takes it for whole."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class CountError:
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
