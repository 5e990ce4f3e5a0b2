"""One request's hand-off as a state machine: no I/O, no clock, one place that decides.

    state, actions = begin(path, candidates, policy)
    state, actions = step(state, event)         # until state is Ended

    Prefilling ──► Decoding ──► Answering ──► Ended
         │             │  ▲         │           ▲
         │             └──┘ once more, locally  │
         └─────────────┴────────────┴───────────┘

The driver performs the actions in their order and reports what happens as events. Until
`Answering` nothing has gone to the client, so a failure may still become another attempt.

Errors: `IllegalStep`, an event that cannot happen in a state: a mistake in the driver.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tandem_contract.paths import ErrorPhase, RoutingPath

from ..connectors.handover import Handover
from .moves import (
    AbortDecode,
    AbortPrefill,
    Action,
    Cause,
    ClientLeft,
    CountError,
    CountRetry,
    Cut,
    DecodeAdmitted,
    DecodeEnded,
    DecodeErrored,
    DecodeLost,
    DecodeStarted,
    DrainExpired,
    Event,
    Fail,
    PassDecode,
    PassPrefill,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
    PrefillUnusable,
    Release,
    StartDecode,
    StartPrefill,
)


class IllegalStep(RuntimeError):
    """An event that the state does not allow."""


class Outcome(StrEnum):
    """How a request ended; every request ends in exactly one."""

    ANSWERED = "answered"
    """An engine's answer, its own errors included, went out whole."""
    FAILED = "failed"
    """An error of ours instead of an answer."""
    CUT = "cut"
    """The answer broke off, visibly."""
    ABANDONED = "abandoned"
    """The client left first."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator of the sidecar chose."""

    fallback_to_unified: bool = True
    """Serve without the split when it is impossible; false: an error instead."""


# States. `path` is what the client is told, should the request end now.


@dataclass(frozen=True, slots=True)
class Prefilling:
    policy: Policy
    candidates: int
    attempt: int = 0
    path: RoutingPath = RoutingPath.PREFILL_THEN_DECODE


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decode leg is out and the client has nothing yet."""

    policy: Policy
    path: RoutingPath
    handover: Handover | None = None
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Answering:
    path: RoutingPath


@dataclass(frozen=True, slots=True)
class Ended:
    path: RoutingPath
    outcome: Outcome


State = Prefilling | Decoding | Answering | Ended
Step = tuple[State, tuple[Action, ...]]

DRAINED: Final = "the pod is shutting down and the request did not finish in time"


def begin(path: RoutingPath, candidates: int, policy: Policy) -> Step:
    """Start a request; `candidates` counts the prefill targets, used on the split path only.

    A split without a candidate is a split that is impossible.
    """
    if path is not RoutingPath.PREFILL_THEN_DECODE:
        return Decoding(policy, path), (StartDecode(None),)
    if candidates == 0:
        return _without_split(policy, path, 502, "no prefill backend is left to ask")
    return Prefilling(policy, candidates), (StartPrefill(0, candidates == 1),)


def step(state: State, event: Event) -> Step:
    """What follows `event`. Raises IllegalStep; past the end everything is without effect."""
    match state:
        case Prefilling():
            return _prefilling(state, event)
        case Decoding():
            return _decoding(state, event)
        case Answering():
            return _answering(state, event)
        case Ended():
            return state, ()


def _prefilling(state: Prefilling, event: Event) -> Step:
    match event:
        case PrefillAnswered(handover):
            return Decoding(state.policy, state.path, handover), (StartDecode(handover),)
        case PrefillUnusable(detail):
            return _prepend(
                CountError(ErrorPhase.KV_TRANSFER),
                _without_split(state.policy, state.path, 502, detail),
            )
        case PrefillRejected():
            return Ended(state.path, Outcome.ANSWERED), (PassPrefill(),)
        case PrefillFailed():
            return _prepend(CountError(ErrorPhase.PREFILL), _after_failed_prefill(state, event))
        case ClientLeft():
            return Ended(state.path, Outcome.ABANDONED), (AbortPrefill(),)
        case DrainExpired():
            return Ended(state.path, Outcome.FAILED), (AbortPrefill(), Fail(503, DRAINED))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_failed_prefill(state: Prefilling, event: PrefillFailed) -> Step:
    """The next candidate while there is one and time; then without the split."""
    if event.cause is Cause.DEADLINE:
        return _prepend(AbortPrefill(), _without_split(state.policy, state.path, 504, event.detail))
    attempt = state.attempt + 1
    if attempt < state.candidates:
        last = attempt + 1 == state.candidates
        return replace(state, attempt=attempt), (CountRetry(), StartPrefill(attempt, last))
    return _without_split(state.policy, state.path, 502, event.detail)


def _decoding(state: Decoding, event: Event) -> Step:
    match event:
        case DecodeAdmitted():
            return replace(state, admitted=True), ()
        case DecodeErrored():
            return _after_decode_error(state)
        case DecodeStarted():
            return Answering(state.path), (PassDecode(),)
        case DecodeLost(detail):
            failed = Ended(state.path, Outcome.FAILED)
            return failed, (CountError(ErrorPhase.DECODE), Fail(502, detail))
        case ClientLeft():
            return Ended(state.path, Outcome.ABANDONED), (AbortDecode(), *_unread(state))
        case DrainExpired():
            failed = Ended(state.path, Outcome.FAILED)
            return failed, (AbortDecode(), *_unread(state), Fail(503, DRAINED))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_decode_error(state: Decoding) -> Step:
    """A 5xx of a leg that was to read KV is taken for a failed load: once more without."""
    if state.handover is None or not state.policy.fallback_to_unified:
        phase = ErrorPhase.DECODE if state.handover is None else ErrorPhase.KV_TRANSFER
        return Answering(state.path), (CountError(phase), PassDecode())
    return Decoding(state.policy, RoutingPath.FALLBACK), (
        CountError(ErrorPhase.KV_TRANSFER),
        CountRetry(),
        AbortDecode(),
        Release(state.handover),
        StartDecode(None),
    )


def _answering(state: Answering, event: Event) -> Step:
    match event:
        case DecodeEnded():
            return Ended(state.path, Outcome.ANSWERED), ()
        case DecodeLost(detail):
            cut = Ended(state.path, Outcome.CUT)
            return cut, (CountError(ErrorPhase.DECODE), Cut(502, detail))
        case ClientLeft():
            return Ended(state.path, Outcome.ABANDONED), (AbortDecode(),)
        case DrainExpired():
            return Ended(state.path, Outcome.CUT), (AbortDecode(), Cut(503, DRAINED))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _without_split(policy: Policy, path: RoutingPath, status: int, why: str) -> Step:
    """The split was wanted and is impossible."""
    if policy.fallback_to_unified:
        return Decoding(policy, RoutingPath.FALLBACK), (StartDecode(None),)
    return Ended(path, Outcome.FAILED), (Fail(status, why),)


def _unread(state: Decoding) -> tuple[Action, ...]:
    """The release due when a decode leg ends that its engine has not taken charge of."""
    return (Release(state.handover),) if state.handover and not state.admitted else ()


def _prepend(action: Action, then: Step) -> Step:
    return then[0], (action, *then[1])
