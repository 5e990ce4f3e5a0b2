"""Each transition of the machine, and that every run ends exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_sidecar.connectors.protocol import KvHold
from tandem_sidecar.handoff import events_actions as m
from tandem_sidecar.handoff import machine as h
from tandem_sidecar.handoff.events_actions import Cause
from tandem_sidecar.observability.record import Outcome
from tandem_sidecar.settings import Policy

from ..peers import PARAMS

P = KvHold(PARAMS)
MAX_ATTEMPTS = 9
SPLIT, FALLBACK = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.FALLBACK
YES, NO = Policy(True), Policy(False)


def prefilling(policy: Policy = YES, attempt: int = 0, of: int = 1) -> m.Prefilling:
    return m.Prefilling(policy, of, MAX_ATTEMPTS, attempt, failures=attempt)


def reading(policy: Policy = YES, *, admitted: bool = False) -> m.Decoding:
    return m.Decoding(policy, SPLIT, P, admitted)


def pairing(policy: Policy = YES, *, started: bool = False, of: int = 1) -> m.BothLegs:
    return m.BothLegs(prefilling(policy, of=of), P, admitted=started, started=started)


LOCAL = m.Decoding(YES, FALLBACK)
PREFILL, DECODE = m.CountError(ErrorPhase.PREFILL), m.CountError(ErrorPhase.DECODE)
KV = m.CountError(ErrorPhase.KV_TRANSFER)
FAILURE = m.ForwardDecodeAnswer(decode_failed=True)
GONE = m.SendError(502, "gone", decode_failed=True)


def ended_state(outcome: Outcome, path: RoutingPath = SPLIT) -> m.Ended:
    return m.Ended(path, outcome)


def test_a_split_begins_with_its_first_candidate() -> None:
    assert h.begin(3, YES, MAX_ATTEMPTS) == (prefilling(of=3), (m.StartPrefill(0, False),))
    assert h.begin(1, YES, MAX_ATTEMPTS) == (prefilling(of=1), (m.StartPrefill(0, True),))


def test_a_split_without_candidates_falls_back() -> None:
    assert h.begin(0, YES, MAX_ATTEMPTS) == (LOCAL, (m.StartDecode(None),))
    state, actions = h.begin(0, NO, MAX_ATTEMPTS)
    assert state == ended_state(Outcome.FAILED)
    assert actions == (m.SendError(502, "no prefill backend is left to ask"),)


RETRYABLE = (Cause.UNREACHABLE, Cause.ERROR, Cause.BUSY)


@pytest.mark.parametrize("cause", RETRYABLE)
def test_prefill_fails_with_a_candidate_left(cause: Cause) -> None:
    state, actions = h.step(prefilling(of=3), m.PrefillFailed(cause, "why"))
    assert (state.path, actions) == (SPLIT, (PREFILL, m.StartPrefill(1, False)))
    assert h.step(state, m.PrefillFailed(cause, "why"))[1][-1] == m.StartPrefill(2, True)


@pytest.mark.parametrize("cause", RETRYABLE)
def test_prefill_fails_with_no_candidate_left(cause: Cause) -> None:
    event = m.PrefillFailed(cause, "why")
    assert h.step(prefilling(attempt=1, of=2), event) == (LOCAL, (PREFILL, m.StartDecode(None)))
    error = m.SendError(503 if cause is Cause.BUSY else 502, "why")
    failed = (ended_state(Outcome.FAILED), (PREFILL, error))
    assert h.step(prefilling(NO, 1, 2), event) == failed


def test_prefill_deadline_asks_no_other_candidate() -> None:
    event = m.PrefillFailed(Cause.DEADLINE, "late")
    fallback = (LOCAL, (PREFILL, m.AbortPrefill(), m.StartDecode(None)))
    assert h.step(prefilling(of=5), event) == fallback
    failed = (ended_state(Outcome.FAILED), (PREFILL, m.AbortPrefill(), m.SendError(504, "late")))
    assert h.step(prefilling(NO, of=5), event) == failed


@pytest.mark.parametrize("cause", [Cause.DEADLINE, Cause.SILENT])
@pytest.mark.parametrize("policy", [YES, NO])
def test_a_prompt_that_may_have_exhausted_a_pod_is_sent_to_no_other(
    cause: Cause, policy: Policy
) -> None:
    event = m.PrefillFailed(cause, "late", may_exhaust=True)
    end = (PREFILL, m.AbortPrefill(), m.SendError(504, "late", may_exhaust=True))
    assert h.step(prefilling(policy, of=5), event) == (ended_state(Outcome.FAILED), end)
    drop = (m.AbortDecode(), m.ReleaseKv(P))
    assert h.step(pairing(policy, of=5), event) == (ended_state(Outcome.FAILED), (*drop, *end))


REFUSED = m.Decoding(YES, FALLBACK, prefill_refused=True)
"""The decode engine is asked because the prefill pod refused the leg."""


@pytest.mark.parametrize("policy", [YES, NO])
def test_a_prefill_4xx_leaves_the_verdict_to_the_decode_engine(policy: Policy) -> None:
    """Also without a fallback, which is for failing pods."""
    step = h.step(prefilling(policy, of=3), m.PrefillRejected("why"))
    assert step == (replace(REFUSED, policy=policy), (m.StartDecode(None),))


def test_a_prefill_4xx_counts_only_if_the_decode_engine_serves_the_request() -> None:
    served = (m.Answering(FALLBACK), (PREFILL, m.ForwardDecodeAnswer()))
    assert h.step(REFUSED, m.DecodeStarted()) == served
    refused = h.step(REFUSED, m.DecodeRefused(kv_released=False))
    assert refused == (m.Decoding(YES, SPLIT, admitted=True), ())
    assert h.step(refused[0], m.DecodeStarted()) == (m.Answering(SPLIT), (m.ForwardDecodeAnswer(),))


@pytest.mark.parametrize(
    ("causes", "retry_after"),
    [
        ([(Cause.BUSY, 7.0)], 7),
        ([(Cause.BUSY, 0.0)], 1),
        ([(Cause.BUSY, 7.0), (Cause.ERROR, 0.0)], 7),
        ([(Cause.ERROR, 0.0), (Cause.CIRCUIT_OPEN, 2.5)], 3),
        ([(Cause.CIRCUIT_OPEN, 9.0), (Cause.BUSY, 2.0)], 2),
    ],
)
def test_without_fallback_a_busy_prefill_is_a_503(
    causes: list[tuple[Cause, float]], retry_after: int
) -> None:
    state: m.State = prefilling(NO, of=len(causes))
    for cause, wait in causes:
        state, actions = h.step(state, m.PrefillFailed(cause, "why", wait))
    assert state == ended_state(Outcome.FAILED)
    assert actions[-1] == m.SendError(503, "why", retry_after=retry_after)


def test_unusable_transfer_params_are_counted_and_fall_back() -> None:
    event = m.PrefillUnusable("nothing there")
    assert h.step(prefilling(of=2), event) == (LOCAL, (KV, m.StartDecode(None)))
    failed = (ended_state(Outcome.FAILED), (KV, m.SendError(502, "nothing there")))
    assert h.step(prefilling(NO, of=2), event) == failed


def test_usable_transfer_params_start_the_decode_leg() -> None:
    assert h.step(prefilling(), m.PrefillAnswered(P)) == (reading(), (m.StartDecode(P),))


@pytest.mark.parametrize("admitted", [True, False])
def test_a_failed_kv_load_is_decoded_once_without_the_kv(admitted: bool) -> None:
    state, actions = h.step(reading(admitted=admitted), m.DecodeErrored())
    assert state == LOCAL
    assert actions == (KV, m.AbortDecode(), m.ReleaseKv(P), m.StartDecode(None))
    engine_may_be_healthy = (m.Answering(FALLBACK), (DECODE, FAILURE))
    assert h.step(state, m.DecodeErrored()) == engine_may_be_healthy


def test_a_failed_kv_load_without_fallback_is_forwarded() -> None:
    passed = (m.Answering(SPLIT), (KV, m.ReleaseKv(P), FAILURE))
    assert h.step(reading(NO), m.DecodeErrored()) == passed


@pytest.mark.parametrize("state", [reading(admitted=True), LOCAL])
def test_decode_dies_before_the_first_byte(state: m.Decoding) -> None:
    failed = (ended_state(Outcome.FAILED, state.path), (DECODE, GONE))
    assert h.step(state, m.DecodeLost("gone")) == failed


def test_decode_dies_before_it_admitted_the_request() -> None:
    failed = (ended_state(Outcome.FAILED), (DECODE, m.ReleaseKv(P), GONE))
    assert h.step(reading(), m.DecodeLost("gone")) == failed


def test_another_engine_takes_over_from_one_that_failed() -> None:
    ended = (ended_state(Outcome.FAILED), (m.AbortDecode(),))
    assert h.step(m.Answering(SPLIT), m.DecodeTakenOver()) == ended


def test_a_busy_decode_engine_gets_no_second_leg() -> None:
    passed = (m.Answering(SPLIT), (DECODE, m.ReleaseKv(P), FAILURE))
    assert h.step(reading(), m.DecodeErrored(busy=True)) == passed


@pytest.mark.parametrize("kv_released", [True, False])
def test_a_decode_4xx_is_forwarded_and_the_kv_is_released_once(kv_released: bool) -> None:
    state, actions = h.step(reading(), m.DecodeRefused(kv_released))
    assert actions == (() if kv_released else (m.ReleaseKv(P),))
    assert h.step(state, m.DecodeStarted()) == (m.Answering(SPLIT), (m.ForwardDecodeAnswer(),))
    expected = (ended_state(Outcome.ABANDONED), (m.AbortDecode(),))
    assert h.step(state, m.ClientDisconnected()) == expected


def test_a_candidate_with_an_open_circuit_is_skipped_and_is_no_attempt() -> None:
    state = m.Prefilling(YES, 3, max_attempts=1)
    circuit_open = m.PrefillFailed(Cause.CIRCUIT_OPEN, "held", 4.2)
    state, actions = h.step(state, circuit_open)  # type: ignore[assignment]  # still prefilling
    assert actions == (m.StartPrefill(1, True),)
    assert h.step(state, m.PrefillFailed(Cause.ERROR, "why"))[0] == LOCAL


@pytest.mark.parametrize(("waits", "retry_after"), [((4.2, 7), 5), ((30, 0.3), 1)])
def test_when_all_circuits_are_open_the_error_has_a_retry_after(
    waits: tuple[float, float], retry_after: int
) -> None:
    state, _ = h.begin(2, NO, MAX_ATTEMPTS)
    for wait in waits:
        state, actions = h.step(state, m.PrefillFailed(Cause.CIRCUIT_OPEN, "held", wait))
    assert (state, actions) == (
        ended_state(Outcome.FAILED),
        (m.SendError(503, "held", retry_after),),
    )


def test_when_all_circuits_are_open_it_falls_back() -> None:
    step = h.step(prefilling(), m.PrefillFailed(Cause.CIRCUIT_OPEN, "held", 1.0))
    assert step == (LOCAL, (m.StartDecode(None),))


def test_a_silent_prefill_is_aborted() -> None:
    _, actions = h.step(prefilling(of=2), m.PrefillFailed(Cause.SILENT, "hung"))
    assert actions == (PREFILL, m.AbortPrefill(), m.StartPrefill(1, True))


DRAINED = h.DRAIN_EXPIRED_MESSAGE
DROP = (m.AbortDecode(), m.ReleaseKv(P))


def test_concurrent_legs_both_start() -> None:
    assert h.step(prefilling(), m.PrefillSent(P)) == (pairing(), (m.StartDecode(P),))


def test_concurrent_legs_forward_nothing_before_the_prefill_2xx() -> None:
    state, actions = h.step(pairing(), m.DecodeAdmitted())
    assert actions == ()
    state, actions = h.step(state, m.DecodeStarted())
    assert (state, actions) == (pairing(started=True), ())
    answering = m.Answering(SPLIT)
    assert h.step(state, m.PrefillAnswered(P)) == (answering, (m.ForwardDecodeAnswer(),))


def test_concurrent_legs_the_prefill_may_answer_first() -> None:
    assert h.step(pairing(), m.PrefillAnswered(P)) == (reading(), ())


def test_concurrent_legs_kv_of_another_engine_is_read_by_a_second_decode_leg() -> None:
    other = KvHold(PARAMS, is_unexpected=True)
    step = h.step(pairing(), m.PrefillAnswered(other))
    assert step == (m.Decoding(YES, SPLIT, other), (m.AbortDecode(), m.StartDecode(other)))


def test_concurrent_legs_kv_of_another_engine_is_released_if_decode_computed_the_prompt() -> None:
    other = KvHold(PARAMS, is_unexpected=True)
    forwarded = (m.Answering(SPLIT), (m.ReleaseKv(other), m.ForwardDecodeAnswer()))
    assert h.step(pairing(started=True), m.PrefillAnswered(other)) == forwarded


def test_concurrent_legs_a_failed_prefill_aborts_decode_and_tries_the_next() -> None:
    state, actions = h.step(pairing(started=True, of=2), m.PrefillFailed(Cause.ERROR, "why"))
    assert state == prefilling(attempt=1, of=2)
    assert actions == (*DROP, PREFILL, m.StartPrefill(1, True))


def test_concurrent_legs_a_refused_prefill_leaves_the_verdict_to_the_decode_engine() -> None:
    step = h.step(pairing(), m.PrefillRejected("why"))
    assert step == (REFUSED, (m.AbortDecode(), m.StartDecode(None)))


def test_concurrent_legs_an_unusable_prefill_falls_back() -> None:
    step = h.step(pairing(), m.PrefillUnusable("nothing"))
    assert step == (LOCAL, (*DROP, KV, m.StartDecode(None)))


def test_concurrent_legs_a_decode_failure_aborts_the_prefill() -> None:
    _, actions = h.step(pairing(), m.DecodeErrored())
    assert actions == (m.AbortPrefill(), KV, *DROP, m.StartDecode(None))
    _, actions = h.step(pairing(), m.DecodeLost("gone"))
    assert actions == (m.AbortPrefill(), DECODE, m.ReleaseKv(P), GONE)
    _, actions = h.step(pairing(), m.DecodeRefused(kv_released=False))
    assert actions == (m.AbortPrefill(), m.ReleaseKv(P))


def test_decode_dies_in_mid_stream() -> None:
    expected = (ended_state(Outcome.CUT), (DECODE, m.CutAnswer(502, "gone", decode_failed=True)))
    assert h.step(m.Answering(SPLIT), m.DecodeLost("gone")) == expected


@pytest.mark.parametrize(
    ("state", "actions"),
    [
        (prefilling(), (m.AbortPrefill(),)),
        (pairing(), (m.AbortPrefill(), *DROP)),
        (pairing(started=True), (m.AbortPrefill(), *DROP)),
        (reading(), (m.AbortDecode(), m.ReleaseKv(P))),
        (reading(admitted=True), (m.AbortDecode(),)),
        (LOCAL, (m.AbortDecode(),)),
        (m.Answering(SPLIT), (m.AbortDecode(),)),
    ],
)
def test_client_disconnects(state: m.State, actions: tuple[m.Action, ...]) -> None:
    assert h.step(state, m.ClientDisconnected()) == (
        ended_state(Outcome.ABANDONED, state.path),
        actions,
    )


@pytest.mark.parametrize(
    ("state", "outcome", "actions"),
    [
        (
            prefilling(),
            Outcome.FAILED,
            (m.AbortPrefill(), m.SendError(503, DRAINED)),
        ),
        (
            pairing(),
            Outcome.FAILED,
            (m.AbortPrefill(), *DROP, m.SendError(503, DRAINED)),
        ),
        (
            reading(),
            Outcome.FAILED,
            (m.AbortDecode(), m.ReleaseKv(P), m.SendError(503, DRAINED)),
        ),
        (
            reading(admitted=True),
            Outcome.FAILED,
            (m.AbortDecode(), m.SendError(503, DRAINED)),
        ),
        (
            m.Answering(SPLIT),
            Outcome.CUT,
            (m.AbortDecode(), m.CutAnswer(503, DRAINED)),
        ),
    ],
)
def test_drain_expires(state: m.State, outcome: Outcome, actions: tuple[m.Action, ...]) -> None:
    assert h.step(state, m.DrainExpired()) == (ended_state(outcome), actions)


SENT: tuple[m.Event, ...] = (m.PrefillSent(P),)
PREFILL_EVENTS: tuple[m.Event, ...] = (
    m.PrefillAnswered(P),
    m.PrefillUnusable("why"),
    m.PrefillRejected("why"),
    *(m.PrefillFailed(cause, "why") for cause in Cause),
)
DECODE_EVENTS: tuple[m.Event, ...] = (
    m.DecodeAdmitted(),
    m.DecodeRefused(kv_released=True),
    m.DecodeRefused(kv_released=False),
    m.DecodeErrored(),
    m.DecodeErrored(busy=True),
    m.DecodeStarted(),
    m.DecodeLost("why"),
)
ANSWER_EVENTS: tuple[m.Event, ...] = (m.DecodeLost("why"), m.DecodeEnded())
ALWAYS: tuple[m.Event, ...] = (m.ClientDisconnected(), m.DrainExpired())


def possible(state: m.State) -> tuple[m.Event, ...]:
    match state:
        case m.Prefilling():
            return PREFILL_EVENTS + SENT + ALWAYS
        case m.BothLegs(started=False):
            return PREFILL_EVENTS + DECODE_EVENTS + ALWAYS
        case m.BothLegs():
            return (*PREFILL_EVENTS, m.DecodeLost("why"), *ALWAYS)
        case m.Decoding():
            return DECODE_EVENTS + ALWAYS
        case m.Answering():
            return ANSWER_EVENTS + ALWAYS
        case m.Ended():
            return PREFILL_EVENTS + SENT + DECODE_EVENTS + ANSWER_EVENTS + ALWAYS


@pytest.mark.parametrize("state", [prefilling(), LOCAL, m.Answering(SPLIT)])
def test_an_impossible_event_raises_illegal_step(state: m.State) -> None:
    events = set(PREFILL_EVENTS + SENT + DECODE_EVENTS + ANSWER_EVENTS) - set(possible(state))
    for event in events:
        with pytest.raises(m.IllegalStep):
            h.step(state, event)


RESPONSES = (m.ForwardDecodeAnswer, m.SendError)
TERMINAL_ENDS = {
    Outcome.ANSWERED: (m.ForwardDecodeAnswer,),
    Outcome.FAILED: (m.SendError,),
}


@given(
    st.data(),
    st.integers(0, 4),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_run_ends_in_exactly_one_outcome(
    data: st.DataObject, candidates: int, fallback: bool, max_attempts: int, has_left: bool
) -> None:
    policy = Policy(fallback)
    state, actions = h.begin(candidates, policy, max_attempts, has_left=has_left)
    all_actions: list[m.Action] = list(actions)
    steps = 0
    while not isinstance(state, m.Ended):
        event = data.draw(st.sampled_from(possible(state)))
        if (
            event == m.DecodeAdmitted()
            and isinstance(state, m.Decoding | m.BothLegs)
            and state.admitted
        ):
            event = m.DecodeStarted()
        state, actions = h.step(state, event)
        all_actions += actions
        steps += 1
        assert steps < 20, "the run does not end"
    check_run(state, all_actions)
    for event in possible(state):
        assert h.step(state, event) == (state, ())


def check_run(end: m.Ended, all_actions: list[m.Action]) -> None:
    responses = [a for a in all_actions if isinstance(a, RESPONSES)]
    assert len(responses) <= 1, "two answers to one request"
    assert (end.outcome is Outcome.ABANDONED) or len(responses) == 1
    assert sum(isinstance(a, m.CutAnswer) for a in all_actions) == (end.outcome is Outcome.CUT)
    if kinds := TERMINAL_ENDS.get(end.outcome):
        assert isinstance(responses[0], kinds)
    starts = [a for a in all_actions if isinstance(a, m.StartDecode)]
    handed = sum(a.kv_hold is not None for a in starts)
    assert len(starts) - handed <= 1, "at most one decode leg without KV"
    assert all(a.kv_hold is not None for a in starts[:-1]), "and it is the last"
    assert sum(isinstance(a, m.AbortDecode) for a in all_actions) >= len(starts) - 1
    assert sum(isinstance(a, m.ReleaseKv) for a in all_actions) <= handed
    indices = [a.candidate for a in all_actions if isinstance(a, m.StartPrefill)]
    assert indices == list(range(len(indices))), "each candidate once, in order"


@pytest.mark.parametrize("waits_for_prefill", [True, False])
@pytest.mark.parametrize("policy", [YES, NO])
@pytest.mark.parametrize(
    ("event", "before"),
    [
        (m.PrefillUnusable("why"), (KV,)),
        (m.PrefillRejected("why"), (PREFILL,)),
        (m.PrefillFailed(Cause.CIRCUIT_OPEN, "why", 9.0), ()),
        (m.PrefillFailed(Cause.BUSY, "why", 9.0), (PREFILL,)),
        (m.PrefillFailed(Cause.DEADLINE, "why"), (PREFILL, m.AbortPrefill())),
        (m.PrefillFailed(Cause.SILENT, "why", 0.0, True), (PREFILL, m.AbortPrefill())),
    ],
)
def test_after_the_pod_that_the_stream_left_the_first_prefill_pod_is_asked(
    event: m.PrefillEvent, before: tuple[m.Action, ...], policy: Policy, waits_for_prefill: bool
) -> None:
    """With one attempt for it, as if there had been none before."""
    first, actions = h.begin(2, policy, 1, has_left=True)
    assert actions == (m.StartPrefill(0, False),)
    if not waits_for_prefill:
        first, _ = h.step(first, m.PrefillSent(P))
    state, actions = h.step(first, event)
    assert actions[-len(before) - 1 :] == (*before, m.StartPrefill(1, True))
    failed = m.PrefillFailed(Cause.ERROR, "why")
    state, actions = h.step(state, failed)
    assert (state, actions) == h.step(m.Prefilling(policy, 1, 1), failed)


def test_fallback_is_never_taken_when_it_is_off() -> None:
    """Of a leg that was refused the decode engine has the last word, with or without it."""
    level = {h.begin(candidates, NO, MAX_ATTEMPTS)[0] for candidates in range(4)}
    while level:
        assert {state.path for state in level} == {SPLIT}
        running = [s for s in level if not isinstance(s, m.Ended)]
        events = {
            s: [e for e in possible(s) if not isinstance(e, m.PrefillRejected)] for s in running
        }
        level = {h.step(s, e)[0] for s, some in events.items() for e in some} - level
