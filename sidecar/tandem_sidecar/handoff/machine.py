"""One request's hand-off as a state machine: no I/O, no clock, one place that decides.

    state, actions = begin(candidates, policy, tries)
    state, actions = step(state, event)         # until state is Ended

    Prefilling ──► Decoding ──► Answering ──► Ended, from each of them
      ▲   │         ▲  │  ▲         ▲
      │   ▼         │  └──┘ once, locally
      └ Pairing ────┴───────────────┘

`Pairing` is where both legs are out at once; a connector whose decode leg needs the prefill's
answer never gets there. The driver performs the actions in their order and reports what happens as
events. Until `Answering` nothing has gone to the client, so a failure may still become another
attempt.

Errors: `IllegalStep`, an event that cannot happen in a state: a mistake in the driver.
"""

from math import ceil, inf
from typing import Final

import msgspec
from msgspec.structs import replace

from tandem_contract.paths import ErrorPhase, RoutingPath

from ..connectors.handover import Handover
from ..observability.record import Outcome
from ..settings import Policy
from .events_actions import (
    AbortDecode,
    AbortPrefill,
    Action,
    Cause,
    ClientLeft,
    CountError,
    Cut,
    DecodeAdmitted,
    DecodeEnded,
    DecodeErrored,
    DecodeLost,
    DecodeRefused,
    DecodeStarted,
    DrainExpired,
    Event,
    Fail,
    PassDecode,
    PassPrefill,
    PrefillAnswered,
    PrefillFailed,
    PrefillRejected,
    PrefillSent,
    PrefillUnusable,
    Release,
    StartDecode,
    StartPrefill,
)


class IllegalStep(RuntimeError):
    """An event that the state does not allow."""


# States. `path` is what the client is told, should the request end now.


class Prefilling(msgspec.Struct, frozen=True, gc=False):
    policy: Policy
    candidates: int
    tries: int
    """Candidates that may be asked; one that is held does not count."""
    attempt: int = 0
    failures: int = 0
    soonest: float = inf
    """Seconds until the first of those held may be asked again."""
    path: RoutingPath = RoutingPath.PREFILL_THEN_DECODE


class Pairing(msgspec.Struct, frozen=True, gc=False):
    """Both legs are out, and nothing of the decode leg is the client's before the prefill's 2xx."""

    prefilling: Prefilling
    handover: Handover
    admitted: bool = False
    started: bool = False
    """Bytes of the answer wait."""
    path: RoutingPath = RoutingPath.PREFILL_THEN_DECODE


class Decoding(msgspec.Struct, frozen=True, gc=False):
    """The decode leg is out and the client has nothing yet."""

    policy: Policy
    path: RoutingPath
    handover: Handover | None = None
    admitted: bool = False


class Answering(msgspec.Struct, frozen=True, gc=False):
    path: RoutingPath


class Ended(msgspec.Struct, frozen=True, gc=False):
    path: RoutingPath
    outcome: Outcome


Running = Prefilling | Pairing | Decoding | Answering
State = Running | Ended
Step = tuple[State, tuple[Action, ...]]

_STOPS: Final = frozenset({ClientLeft, DrainExpired})
"""Looked up by type: isinstance takes long to say no of a struct. So frequent cases come first."""
DRAINED: Final = "the pod is shutting down and the request did not finish in time"


def begin(candidates: int, policy: Policy, tries: int) -> Step:
    """Start a request that is to be split; `candidates` counts the prefill targets.

    A split without a candidate is a split that is impossible.
    """
    if candidates == 0:
        none = Fail(502, "no prefill backend is left to ask")
        return _without_split(policy, RoutingPath.PREFILL_THEN_DECODE, none)
    return Prefilling(policy, candidates, tries), (StartPrefill(0, candidates == 1 or tries == 1),)


def step(state: State, event: Event) -> Step:
    """What follows `event`. Raises IllegalStep; past the end everything is without effect."""
    if type(event) in _STOPS and not isinstance(state, Ended):
        return _stopped(state, event)
    match state:
        case Decoding():
            return _decoding(state, event)
        case Answering():
            return _answering(state, event)
        case Prefilling():
            return _prefilling(state, event)
        case Pairing():
            return _pairing(state, event)
        case Ended():
            return state, ()


def _stopped(state: Running, event: Event) -> Step:
    """Whatever is out is stopped; KV that no engine has taken charge of is released."""
    match state:
        case Prefilling():
            actions: tuple[Action, ...] = (AbortPrefill(),)
        case Pairing():
            actions = AbortPrefill(), AbortDecode(), Release(state.handover)
        case Decoding():
            actions = AbortDecode(), *_unread(state)
        case Answering():
            actions = (AbortDecode(),)
    if isinstance(event, ClientLeft):
        return Ended(state.path, Outcome.ABANDONED), actions
    if isinstance(state, Answering):
        return Ended(state.path, Outcome.CUT), (*actions, Cut(503, DRAINED))
    return Ended(state.path, Outcome.FAILED), (*actions, Fail(503, DRAINED))


def _prefilling(state: Prefilling, event: Event) -> Step:
    match event:
        case PrefillAnswered(handover):
            return Decoding(state.policy, state.path, handover), (StartDecode(handover),)
        case PrefillSent(handover):
            return Pairing(state, handover), (StartDecode(handover),)
        case PrefillUnusable():
            return _after_unusable(state, event)
        case PrefillRejected():
            return Ended(state.path, Outcome.ANSWERED), (PassPrefill(),)
        case PrefillFailed():
            return _after_failed_prefill(state, event)
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_unusable(state: Prefilling, event: PrefillUnusable) -> Step:
    return _prepend(
        (CountError(ErrorPhase.KV_TRANSFER),),
        _without_split(state.policy, state.path, Fail(502, event.detail)),
    )


def _after_failed_prefill(state: Prefilling, event: PrefillFailed) -> Step:
    """The next candidate while there is one and time; then without the split."""
    if event.cause is Cause.HELD:
        return _next(replace(state, soonest=min(state.soonest, event.wait)), event)
    failed: tuple[Action, ...] = (CountError(ErrorPhase.PREFILL),)
    if event.cause is Cause.DEADLINE:
        late = _without_split(state.policy, state.path, Fail(504, event.detail))
        return _prepend((*failed, AbortPrefill()), late)
    if event.cause is Cause.SILENT:
        failed = (*failed, AbortPrefill())
    return _prepend(failed, _next(replace(state, failures=state.failures + 1), event))


def _next(state: Prefilling, event: PrefillFailed) -> Step:
    attempt, left = state.attempt + 1, state.tries - state.failures
    if attempt < state.candidates and left > 0:
        last = attempt + 1 == state.candidates or left == 1
        return replace(state, attempt=attempt), (StartPrefill(attempt, last),)
    if state.failures == 0:
        held = Fail(503, event.detail, retry_after=max(1, ceil(state.soonest)))
        return _without_split(state.policy, state.path, held)
    return _without_split(state.policy, state.path, Fail(502, event.detail))


def _pairing(state: Pairing, event: Event) -> Step:
    before = state.prefilling
    drop: tuple[Action, ...] = (AbortDecode(), Release(state.handover))
    match event:
        case PrefillAnswered(handover):
            return _paired(state, handover)
        case PrefillUnusable():
            return _prepend(drop, _after_unusable(before, event))
        case PrefillRejected():
            return Ended(state.path, Outcome.ANSWERED), (AbortDecode(), PassPrefill())
        case PrefillFailed():
            return _prepend(drop, _after_failed_prefill(before, event))
        case DecodeAdmitted() | DecodeStarted():
            started = isinstance(event, DecodeStarted)
            return replace(state, admitted=True, started=started), ()
        case _:
            decoding = Decoding(before.policy, state.path, state.handover)
            return _prepend((AbortPrefill(),), _decoding(decoding, event))


def _paired(state: Pairing, handover: Handover) -> Step:
    """The prefill's 2xx is here: the decode leg is as if it had begun now."""
    if state.started:
        return Answering(state.path), (PassDecode(),)
    return Decoding(state.prefilling.policy, state.path, handover, state.admitted), ()


def _decoding(state: Decoding, event: Event) -> Step:
    match event:
        case DecodeAdmitted():
            return Decoding(state.policy, state.path, state.handover, admitted=True), ()
        case DecodeStarted():
            return Answering(state.path), (PassDecode(),)
        case DecodeRefused(released):
            refused = replace(state, handover=None, admitted=True)
            return refused, () if released else _unread(state)
        case DecodeErrored(busy):
            return _after_decode_error(state, busy)
        case DecodeLost(_, again) if again and state.handover and state.policy.fallback_to_unified:
            return _locally(state, state.handover)
        case DecodeLost(detail):
            failed = Ended(state.path, Outcome.FAILED)
            return failed, (CountError(ErrorPhase.DECODE), *_unread(state), Fail(502, detail))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_decode_error(state: Decoding, busy: bool) -> Step:
    """A 5xx of a leg that was to read KV is taken for a failed load: once more without."""
    if state.handover is None:
        return Answering(state.path), (CountError(ErrorPhase.DECODE), PassDecode())
    release = Release(state.handover)
    if busy:
        return Answering(state.path), (CountError(ErrorPhase.DECODE), release, PassDecode())
    if not state.policy.fallback_to_unified:
        return Answering(state.path), (CountError(ErrorPhase.KV_TRANSFER), release, PassDecode())
    return _locally(state, state.handover)


def _locally(state: Decoding, unread: Handover) -> Step:
    """Once more, the engine computing the prompt itself."""
    return Decoding(state.policy, RoutingPath.FALLBACK), (
        CountError(ErrorPhase.KV_TRANSFER),
        AbortDecode(),
        Release(unread),
        StartDecode(None),
    )


def _answering(state: Answering, event: Event) -> Step:
    match event:
        case DecodeEnded():
            return Ended(state.path, Outcome.ANSWERED), ()
        case DecodeLost(detail):
            cut = Ended(state.path, Outcome.CUT)
            return cut, (CountError(ErrorPhase.DECODE), Cut(502, detail))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _without_split(policy: Policy, path: RoutingPath, fail: Fail) -> Step:
    """The split was wanted and is impossible."""
    if policy.fallback_to_unified:
        return Decoding(policy, RoutingPath.FALLBACK), (StartDecode(None),)
    return Ended(path, Outcome.FAILED), (fail,)


def _unread(state: Decoding) -> tuple[Action, ...]:
    """The release due when a decode leg ends that its engine has not taken charge of."""
    return (Release(state.handover),) if state.handover and not state.admitted else ()


def _prepend(actions: tuple[Action, ...], then: Step) -> Step:
    return then[0], (*actions, *then[1])
