"""The failure table, row by row, and that every run ends once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.paths import ErrorPhase, RoutingPath
from tandem_sidecar.connectors.handover import Handover
from tandem_sidecar.handoff import machine as h
from tandem_sidecar.handoff import moves as m
from tandem_sidecar.handoff.machine import Outcome
from tandem_sidecar.handoff.moves import Cause

from ..peers import PARAMS

P = Handover(PARAMS)
SPLIT, FALLBACK = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.FALLBACK
YES, NO = h.Policy(True), h.Policy(False)


def prefilling(policy: h.Policy = YES, attempt: int = 0, of: int = 1) -> h.Prefilling:
    return h.Prefilling(policy, of, attempt)


def reading(policy: h.Policy = YES, *, admitted: bool = False) -> h.Decoding:
    return h.Decoding(policy, SPLIT, P, admitted)


LOCAL = h.Decoding(YES, FALLBACK)
PREFILL, DECODE = m.CountError(ErrorPhase.PREFILL), m.CountError(ErrorPhase.DECODE)
KV = m.CountError(ErrorPhase.KV_TRANSFER)


def ended(outcome: Outcome, path: RoutingPath = SPLIT) -> h.Ended:
    return h.Ended(path, outcome)


@pytest.mark.parametrize("path", [p for p in RoutingPath if p is not SPLIT])
def test_a_path_without_prefill_decodes_at_once(path: RoutingPath) -> None:
    assert h.begin(path, 0, YES) == (h.Decoding(YES, path), (m.StartDecode(None),))


def test_a_split_begins_with_its_first_candidate() -> None:
    assert h.begin(SPLIT, 3, YES) == (prefilling(of=3), (m.StartPrefill(0, False),))
    assert h.begin(SPLIT, 1, YES) == (prefilling(of=1), (m.StartPrefill(0, True),))


def test_a_split_without_candidates_falls_back() -> None:
    assert h.begin(SPLIT, 0, YES) == (LOCAL, (m.StartDecode(None),))
    state, actions = h.begin(SPLIT, 0, NO)
    assert state == ended(Outcome.FAILED)
    assert actions == (m.Fail(502, "no prefill backend is left to ask"),)


RETRYABLE = (Cause.UNREACHABLE, Cause.ERROR, Cause.BUSY)


@pytest.mark.parametrize("cause", RETRYABLE)
def test_prefill_fails_with_a_candidate_left(cause: Cause) -> None:
    step = h.step(prefilling(of=3), m.PrefillFailed(cause, "why"))
    assert step == (
        prefilling(attempt=1, of=3),
        (PREFILL, m.CountRetry(), m.StartPrefill(1, False)),
    )
    assert h.step(step[0], m.PrefillFailed(cause, "why"))[1][-1] == m.StartPrefill(2, True)


@pytest.mark.parametrize("cause", RETRYABLE)
def test_prefill_fails_with_none_left(cause: Cause) -> None:
    event = m.PrefillFailed(cause, "why")
    assert h.step(prefilling(attempt=1, of=2), event) == (LOCAL, (PREFILL, m.StartDecode(None)))
    failed = (ended(Outcome.FAILED), (PREFILL, m.Fail(502, "why")))
    assert h.step(prefilling(NO, 1, 2), event) == failed


def test_prefill_deadline_asks_no_other_candidate() -> None:
    event = m.PrefillFailed(Cause.DEADLINE, "late")
    fallback = (LOCAL, (PREFILL, m.AbortPrefill(), m.StartDecode(None)))
    assert h.step(prefilling(of=5), event) == fallback
    failed = (ended(Outcome.FAILED), (PREFILL, m.AbortPrefill(), m.Fail(504, "late")))
    assert h.step(prefilling(NO, of=5), event) == failed


def test_prefill_4xx_is_the_clients() -> None:
    assert h.step(prefilling(of=3), m.PrefillRejected()) == (
        ended(Outcome.ANSWERED),
        (m.PassPrefill(),),
    )


def test_unusable_params_count_and_decode_without() -> None:
    event = m.PrefillUnusable("nothing there")
    assert h.step(prefilling(of=2), event) == (LOCAL, (KV, m.StartDecode(None)))
    failed = (ended(Outcome.FAILED), (KV, m.Fail(502, "nothing there")))
    assert h.step(prefilling(NO, of=2), event) == failed


def test_usable_params_start_the_decode_leg() -> None:
    assert h.step(prefilling(), m.PrefillAnswered(P)) == (reading(), (m.StartDecode(P),))


@pytest.mark.parametrize("admitted", [True, False])
def test_failed_kv_load_is_decoded_once_locally(admitted: bool) -> None:
    state, actions = h.step(reading(admitted=admitted), m.DecodeErrored())
    assert state == LOCAL
    assert actions == (KV, m.CountRetry(), m.AbortDecode(), m.Release(P), m.StartDecode(None))
    again = (h.Answering(FALLBACK), (DECODE, m.PassDecode()))
    assert h.step(state, m.DecodeErrored()) == again


def test_failed_kv_load_without_fallback_is_passed_on() -> None:
    assert h.step(reading(NO), m.DecodeErrored()) == (h.Answering(SPLIT), (KV, m.PassDecode()))


@pytest.mark.parametrize("state", [reading(), reading(admitted=True), LOCAL])
def test_decode_dies_before_the_first_byte(state: h.Decoding) -> None:
    failed = (ended(Outcome.FAILED, state.path), (DECODE, m.Fail(502, "gone")))
    assert h.step(state, m.DecodeLost("gone")) == failed


def test_decode_dies_in_mid_stream() -> None:
    cut = (ended(Outcome.CUT), (DECODE, m.Cut(502, "gone")))
    assert h.step(h.Answering(SPLIT), m.DecodeLost("gone")) == cut


@pytest.mark.parametrize(
    ("state", "actions"),
    [
        (prefilling(), (m.AbortPrefill(),)),
        (reading(), (m.AbortDecode(), m.Release(P))),
        (reading(admitted=True), (m.AbortDecode(),)),
        (LOCAL, (m.AbortDecode(),)),
        (h.Answering(SPLIT), (m.AbortDecode(),)),
    ],
)
def test_client_leaves(state: h.State, actions: tuple[m.Action, ...]) -> None:
    assert h.step(state, m.ClientLeft()) == (ended(Outcome.ABANDONED, state.path), actions)


@pytest.mark.parametrize(
    ("state", "outcome", "actions"),
    [
        (prefilling(), Outcome.FAILED, (m.AbortPrefill(), m.Fail(503, h.DRAINED))),
        (reading(), Outcome.FAILED, (m.AbortDecode(), m.Release(P), m.Fail(503, h.DRAINED))),
        (reading(admitted=True), Outcome.FAILED, (m.AbortDecode(), m.Fail(503, h.DRAINED))),
        (h.Answering(SPLIT), Outcome.CUT, (m.AbortDecode(), m.Cut(503, h.DRAINED))),
    ],
)
def test_drain_expires(state: h.State, outcome: Outcome, actions: tuple[m.Action, ...]) -> None:
    assert h.step(state, m.DrainExpired()) == (ended(outcome), actions)


PREFILL_EVENTS: tuple[m.Event, ...] = (
    m.PrefillAnswered(P),
    m.PrefillUnusable("why"),
    m.PrefillRejected(),
    *(m.PrefillFailed(cause, "why") for cause in Cause),
)
DECODE_EVENTS: tuple[m.Event, ...] = (
    m.DecodeAdmitted(),
    m.DecodeErrored(),
    m.DecodeStarted(),
    m.DecodeLost("why"),
)
ANSWER_EVENTS: tuple[m.Event, ...] = (m.DecodeLost("why"), m.DecodeEnded())
ALWAYS: tuple[m.Event, ...] = (m.ClientLeft(), m.DrainExpired())


def possible(state: h.State) -> tuple[m.Event, ...]:
    match state:
        case h.Prefilling():
            return PREFILL_EVENTS + ALWAYS
        case h.Decoding():
            return DECODE_EVENTS + ALWAYS
        case h.Answering():
            return ANSWER_EVENTS + ALWAYS
        case h.Ended():
            return PREFILL_EVENTS + DECODE_EVENTS + ANSWER_EVENTS + ALWAYS


@pytest.mark.parametrize("state", [prefilling(), LOCAL, h.Answering(SPLIT)])
def test_what_cannot_happen_is_refused(state: h.State) -> None:
    events = set(PREFILL_EVENTS + DECODE_EVENTS + ANSWER_EVENTS) - set(possible(state))
    for event in events:
        with pytest.raises(h.IllegalStep):
            h.step(state, event)


RESPONSES = (m.PassPrefill, m.PassDecode, m.Fail)
TERMINAL_ENDS = {Outcome.ANSWERED: (m.PassPrefill, m.PassDecode), Outcome.FAILED: (m.Fail,)}


@given(st.data(), st.sampled_from(list(RoutingPath)), st.integers(0, 4), st.booleans())
def test_every_run_ends_in_exactly_one_outcome(
    data: st.DataObject, path: RoutingPath, candidates: int, fallback: bool
) -> None:
    state, actions = h.begin(path, candidates, h.Policy(fallback))
    done: list[m.Action] = list(actions)
    steps = 0
    while not isinstance(state, h.Ended):
        event = data.draw(st.sampled_from(possible(state)))
        if event == m.DecodeAdmitted() and isinstance(state, h.Decoding) and state.admitted:
            event = m.DecodeStarted()
        state, actions = h.step(state, event)
        done += actions
        steps += 1
        assert steps < 20, "it does not end"
    check_run(state, done)
    for event in possible(state):
        assert h.step(state, event) == (state, ())


def check_run(end: h.Ended, done: list[m.Action]) -> None:
    responses = [a for a in done if isinstance(a, RESPONSES)]
    assert len(responses) <= 1, "two answers to one request"
    assert (end.outcome is Outcome.ABANDONED) or len(responses) == 1
    assert sum(isinstance(a, m.Cut) for a in done) == (end.outcome is Outcome.CUT)
    if kinds := TERMINAL_ENDS.get(end.outcome):
        assert isinstance(responses[0], kinds)
    starts = [a for a in done if isinstance(a, m.StartDecode)]
    assert len(starts) <= 2, "at most one local retry"
    assert all(a.handover is None for a in starts[1:])
    assert sum(isinstance(a, m.Release) for a in done) <= 1
    indices = [a.candidate for a in done if isinstance(a, m.StartPrefill)]
    assert indices == list(range(len(indices))), "each candidate once, in order"


def test_fallback_is_never_taken_when_it_is_off() -> None:
    level = {h.begin(SPLIT, candidates, NO)[0] for candidates in range(4)}
    while level:
        assert {state.path for state in level} == {SPLIT}
        running = [s for s in level if not isinstance(s, h.Ended)]
        level = {h.step(s, e)[0] for s in running for e in possible(s)} - level
