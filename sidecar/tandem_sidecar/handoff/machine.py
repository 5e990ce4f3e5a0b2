"""The state machine of one hand-off: pure, without I/O or clock. All decisions are made here.

    state, actions = begin(candidates, policy, max_attempts)
    state, actions = step(state, event)         # until state is Ended

    Prefilling ──► Decoding ──► Answering ──► Ended, which every state can reach
      ▲   │         ▲  │  ▲         ▲
      │   ▼         │  └──┘ once, without the KV
     BothLegs ──────┴───────────────┘

In `BothLegs` the prefill and the decode leg are in flight at the same time; a hand-off whose decode
leg needs the prefill's answer never gets there. The driver performs the actions in order and
reports what happens as events. Nothing is sent to the client before `Answering`, so until then a
failure can still lead to another attempt.
"""

from math import ceil, inf
from typing import Final

from msgspec.structs import replace

from tandem_contract.paths import ErrorPhase, RoutingPath

from ..connectors.protocol import KvHold
from ..observability.record import Outcome
from ..settings import Policy
from .events_actions import (
    AbortDecode,
    AbortPrefill,
    Action,
    Answering,
    BothLegs,
    Cause,
    ClientDisconnected,
    CountError,
    CutAnswer,
    DecodeAdmitted,
    DecodeEnded,
    DecodeErrored,
    DecodeLost,
    DecodeRefused,
    DecodeStarted,
    DecodeTakenOver,
    Decoding,
    DrainExpired,
    Ended,
    Event,
    ForwardDecodeAnswer,
    IllegalStep,
    PrefillAnswered,
    PrefillFailed,
    Prefilling,
    PrefillRejected,
    PrefillSent,
    PrefillUnusable,
    ReleaseKv,
    Running,
    SendError,
    StartDecode,
    StartPrefill,
    State,
)

Step = tuple[State, tuple[Action, ...]]

_STOPS: Final = frozenset({ClientDisconnected, DecodeTakenOver, DrainExpired})
"""Looked up by type because a failing isinstance check of a Struct is slow. For the same reason
`step` and the functions below test frequent cases first."""
_ASKS_TO_WAIT: Final = frozenset({Cause.BUSY, Cause.CIRCUIT_OPEN})
DRAIN_EXPIRED_MESSAGE: Final = "the pod is shutting down and the request did not finish in time"


def begin(candidates: int, policy: Policy, max_attempts: int, *, has_left: bool = False) -> Step:
    """Start a request that is to be split between engines; `candidates` counts the prefill pods.

    `has_left`: the first candidate is the pod that the stream left; its attempt does not count.
    Without a candidate the request falls back to the decode engine or fails, as `policy` says.
    """
    if candidates == 0:
        error = SendError(502, "no prefill backend is left to ask")
        return _fall_back_or_fail(policy, RoutingPath.PREFILL_THEN_DECODE, error)
    last = candidates == 1 or (max_attempts == 1 and not has_left)
    return Prefilling(policy, candidates, max_attempts, has_left=has_left), (StartPrefill(0, last),)


def step(state: State, event: Event) -> Step:
    """Return the next state and the actions that `event` causes.

    Raises IllegalStep. Events after the end have no effect.
    """
    # Tested before the state: these events end a request in whatever state it is.
    if type(event) in _STOPS and not isinstance(state, Ended):
        return _stop(state, event)
    match state:
        case Decoding():
            return _step_decoding(state, event)
        case Answering():
            return _step_answering(state, event)
        case Prefilling():
            return _step_prefilling(state, event)
        case BothLegs():
            return _step_both_legs(state, event)
        case Ended():
            return state, ()


def _stop(state: Running, event: Event) -> Step:
    """Abort the legs in flight and release KV that no decode engine has admitted."""
    match state:
        case Prefilling():
            actions: tuple[Action, ...] = (AbortPrefill(),)
        case BothLegs():
            # Admission does not matter here: the prefill may still be computing the KV.
            actions = AbortPrefill(), AbortDecode(), ReleaseKv(state.kv_hold)
        case Decoding():
            actions = AbortDecode(), *_release_if_not_admitted(state)
        case Answering():
            actions = (AbortDecode(),)
    if isinstance(event, ClientDisconnected):
        return Ended(state.path, Outcome.ABANDONED), actions
    if isinstance(event, DecodeTakenOver):
        return Ended(state.path, Outcome.FAILED), actions
    if isinstance(state, Answering):
        return Ended(state.path, Outcome.CUT), (*actions, CutAnswer(503, DRAIN_EXPIRED_MESSAGE))
    return Ended(state.path, Outcome.FAILED), (*actions, SendError(503, DRAIN_EXPIRED_MESSAGE))


def _step_prefilling(state: Prefilling, event: Event) -> Step:
    match event:
        case PrefillAnswered(kv_hold):
            return Decoding(state.policy, state.path, kv_hold), (StartDecode(kv_hold),)
        case PrefillSent(kv_hold):
            return BothLegs(state, kv_hold), (StartDecode(kv_hold),)
        case PrefillUnusable() | PrefillRejected() | PrefillFailed():
            return _after_prefill_without_kv(state, event)
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_prefill_without_kv(
    state: Prefilling, event: PrefillUnusable | PrefillRejected | PrefillFailed
) -> Step:
    if state.has_left and state.attempt == 0 and state.candidates > 1:
        return _after_the_pod_that_it_left(state, event)
    match event:
        case PrefillUnusable():
            return _after_unusable_prefill(state, event)
        case PrefillRejected():
            return _after_refused_prefill(state)
        case PrefillFailed():
            return _after_failed_prefill(state, event)


def _after_the_pod_that_it_left(
    state: Prefilling, event: PrefillUnusable | PrefillRejected | PrefillFailed
) -> Step:
    """Ask the first prefill pod, whatever the reason: the other one drains, and had computed the
    prompt, so that its failure tells nothing of them or the prompt."""
    phase = ErrorPhase.KV_TRANSFER if isinstance(event, PrefillUnusable) else ErrorPhase.PREFILL
    cause = event.cause if isinstance(event, PrefillFailed) else None
    counted = () if cause is Cause.CIRCUIT_OPEN else (CountError(phase),)
    abort = (AbortPrefill(),) if cause in {Cause.DEADLINE, Cause.SILENT} else ()
    last = state.candidates == 2 or state.max_attempts == 1
    return replace(state, attempt=1), (*counted, *abort, StartPrefill(1, last))


def _after_unusable_prefill(state: Prefilling, event: PrefillUnusable) -> Step:
    return _prepend(
        (CountError(ErrorPhase.KV_TRANSFER),),
        _fall_back_or_fail(state.policy, state.path, SendError(502, event.detail)),
    )


def _after_refused_prefill(state: Prefilling) -> Step:
    """Ask the decode engine, whatever the policy says of failing pods: the leg is another request
    than the client's, so a 4xx of it proves nothing about either."""
    refused = Decoding(state.policy, RoutingPath.FALLBACK, prefill_refused=True)
    return refused, (StartDecode(None),)


def _after_failed_prefill(state: Prefilling, event: PrefillFailed) -> Step:
    """Try the next candidate while there is one and time; then fall back or fail."""
    if event.cause in _ASKS_TO_WAIT:
        state = replace(state, earliest_retry=min(state.earliest_retry, event.retry_after))
    if event.cause is Cause.CIRCUIT_OPEN:
        return _try_next_candidate(state, event)
    failed: tuple[Action, ...] = (CountError(ErrorPhase.PREFILL),)
    if event.may_exhaust:
        # Another engine, or the decode engine, would hang as well, and with it other requests.
        ended = Ended(state.path, Outcome.FAILED)
        return ended, (*failed, AbortPrefill(), SendError(504, event.detail, may_exhaust=True))
    if event.cause is Cause.DEADLINE:
        error = SendError(504, event.detail)
        return _prepend(
            (*failed, AbortPrefill()), _fall_back_or_fail(state.policy, state.path, error)
        )
    # The other causes ended the leg; a hung engine's leg is still in flight.
    if event.cause is Cause.SILENT:
        failed = (*failed, AbortPrefill())
    state = replace(state, failures=state.failures + 1)
    return _prepend(failed, _try_next_candidate(state, event))


def _try_next_candidate(state: Prefilling, event: PrefillFailed) -> Step:
    attempt, left = state.attempt + 1, state.max_attempts - state.failures
    if attempt < state.candidates and left > 0:
        last = attempt + 1 == state.candidates or left == 1
        return replace(state, attempt=attempt), (StartPrefill(attempt, last),)
    if state.earliest_retry < inf:
        # A candidate is busy or was skipped: the client may retry when the first takes requests.
        retry_after = max(1, ceil(state.earliest_retry))
        error = SendError(503, event.detail, retry_after=retry_after)
    else:
        error = SendError(502, event.detail)
    return _fall_back_or_fail(state.policy, state.path, error)


def _step_both_legs(state: BothLegs, event: Event) -> Step:
    prefilling = state.prefilling
    # A failed prefill takes the decode leg with it, which waits for KV that may never come.
    drop: tuple[Action, ...] = (AbortDecode(), ReleaseKv(state.kv_hold))
    match event:
        case PrefillAnswered(kv_hold):
            return _after_concurrent_prefill(state, kv_hold)
        case PrefillUnusable() | PrefillFailed():
            return _prepend(drop, _after_prefill_without_kv(prefilling, event))
        case PrefillRejected():
            # No release: an engine that rejected the request holds no KV.
            return _prepend((AbortDecode(),), _after_prefill_without_kv(prefilling, event))
        # Only remembered: nothing is sent to the client before the prefill's 2xx.
        case DecodeAdmitted() | DecodeStarted():
            started = isinstance(event, DecodeStarted)
            return replace(state, admitted=True, started=started), ()
        case _:
            # The decode leg failed or refused first: without it the prefill has no reader.
            decoding = Decoding(prefilling.policy, state.path, state.kv_hold)
            return _prepend((AbortPrefill(),), _step_decoding(decoding, event))


def _after_concurrent_prefill(state: BothLegs, kv_hold: KvHold) -> Step:
    """The prefill answered 2xx: go on as if the decode leg had been started only now, or, if it
    cannot read the KV and the engine has not computed the prompt itself by now, send it again."""
    if state.started:
        release = (ReleaseKv(kv_hold),) if kv_hold.is_unexpected else ()
        return Answering(state.path), (*release, ForwardDecodeAnswer())
    decoding = Decoding(state.prefilling.policy, state.path, kv_hold)
    if kv_hold.is_unexpected:
        return decoding, (AbortDecode(), StartDecode(kv_hold))
    return replace(decoding, admitted=state.admitted), ()


def _step_decoding(state: Decoding, event: Event) -> Step:
    match event:
        case DecodeAdmitted():
            # The engine has taken over the KV: ending this leg needs no release from now on.
            return Decoding(state.policy, state.path, state.kv_hold, admitted=True), ()
        case DecodeStarted():
            forward = (ForwardDecodeAnswer(),)
            count = (CountError(ErrorPhase.PREFILL),) if state.prefill_refused else ()
            return Answering(state.path), (*count, *forward)
        case DecodeRefused(kv_released):
            # KV that the engine left unread is released now, so the new state has none to release.
            # The refusal is forwarded once its bytes arrive. If the prefill pod refused the leg,
            # too, it is the client's fault, and no fallback.
            path = RoutingPath.PREFILL_THEN_DECODE if state.prefill_refused else state.path
            refused = Decoding(state.policy, path, admitted=True)
            return refused, (() if kv_released else _release_if_not_admitted(state))
        case DecodeErrored():
            return _after_decode_error(state, event)
        # The engine itself may be healthy: compute the prompt there, once (then without KV).
        case DecodeLost(_, True) if state.kv_hold and state.policy.fallback_to_unified:
            return _decode_without_kv(state, state.kv_hold)
        case DecodeLost(detail):
            failed = Ended(state.path, Outcome.FAILED)
            release = _release_if_not_admitted(state)
            error = SendError(502, detail, decode_failed=True)
            return failed, (CountError(ErrorPhase.DECODE), *release, error)
        case _:
            raise IllegalStep(f"{event} while {state}")


def _after_decode_error(state: Decoding, event: DecodeErrored) -> Step:
    """Treat a 5xx of a leg that reads KV as a failed KV load: decode once more without the KV."""
    if state.kv_hold is None:
        return _report_decode_error(state, event, CountError(ErrorPhase.DECODE))
    # A busy engine takes no more requests, so a second leg would not help: its answer is forwarded,
    # and the client may retry.
    if event.busy or not state.policy.fallback_to_unified:
        phase = ErrorPhase.DECODE if event.busy else ErrorPhase.KV_TRANSFER
        return _report_decode_error(state, event, CountError(phase), ReleaseKv(state.kv_hold))
    return _decode_without_kv(state, state.kv_hold)


def _report_decode_error(state: Decoding, event: DecodeErrored, *before: Action) -> Step:
    """Give the client the engine's error; one within a stream as a status, which routers count."""
    if event.error is None:
        return Answering(state.path), (*before, ForwardDecodeAnswer(decode_failed=True))
    return Ended(state.path, Outcome.FAILED), (*before, AbortDecode(), event.error)


def _decode_without_kv(state: Decoding, unread: KvHold) -> Step:
    """Send a second decode leg, for which the engine computes the prompt itself."""
    return Decoding(state.policy, RoutingPath.FALLBACK), (
        CountError(ErrorPhase.KV_TRANSFER),
        AbortDecode(),
        ReleaseKv(unread),
        StartDecode(None),
    )


def _step_answering(state: Answering, event: Event) -> Step:
    match event:
        case DecodeEnded():
            return Ended(state.path, Outcome.ANSWERED), ()
        case DecodeLost(detail):
            cut = Ended(state.path, Outcome.CUT)
            return cut, (CountError(ErrorPhase.DECODE), CutAnswer(502, detail, decode_failed=True))
        case _:
            raise IllegalStep(f"{event} while {state}")


def _fall_back_or_fail(policy: Policy, path: RoutingPath, error: SendError) -> Step:
    """No prefill is possible: have the decode engine compute the prompt, or send `error`."""
    if policy.fallback_to_unified:
        return Decoding(policy, RoutingPath.FALLBACK), (StartDecode(None),)
    return Ended(path, Outcome.FAILED), (error,)


def _release_if_not_admitted(state: Decoding) -> tuple[Action, ...]:
    """The release that is due if a decode leg ends before its engine admitted the request."""
    return (ReleaseKv(state.kv_hold),) if state.kv_hold and not state.admitted else ()


def _prepend(actions: tuple[Action, ...], then: Step) -> Step:
    return then[0], (*actions, *then[1])
