"""Outcomes by what was observed: the earliest cause counts."""

from itertools import product

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.client.outcome import LAST_EVENTS, Facts, Promises, classify, promises_of
from tandem_loadtest.records import Outcome

GOOD = Facts(200, finish_reason="stop", has_usage=True, has_last_event=True)
STREAM = Promises(usage=True, last_event="[DONE]")


@pytest.mark.parametrize(
    ("facts", "outcome", "reason"),
    [
        (GOOD, Outcome.OK, None),
        (Facts(429, message="later"), Outcome.SHED, "HTTP 429: later"),
        (Facts(503, message="full"), Outcome.SHED, "HTTP 503: full"),
        (Facts(500, message="oh"), Outcome.ERROR_STATUS, "HTTP 500: oh"),
        (Facts(204, message="an empty body"), Outcome.ERROR_STATUS, "HTTP 204: an empty body"),
        (Facts(200, answer_error="died"), Outcome.IN_BAND_ERROR, "died"),
        (Facts(answer_error="no HTTP"), Outcome.IN_BAND_ERROR, "no HTTP"),
        (Facts(200, finish_reason="abort"), Outcome.IN_BAND_ERROR,
         "the engine gave up: finish_reason 'abort'"),
        (Facts(200, finish_reason="error", has_usage=True, has_last_event=True),
         Outcome.IN_BAND_ERROR, "the engine gave up: finish_reason 'error'"),
        (Facts(timeout="timed out"), Outcome.TIMEOUT, "timed out"),
        (Facts(lost="closed"), Outcome.CONNECTION_LOST, "closed"),
        (Facts(200, has_usage=True, has_last_event=True), Outcome.TRUNCATED,
         "the answer ended without a finish reason"),
        (Facts(200, finish_reason="stop", has_last_event=True), Outcome.TRUNCATED,
         "the answer ended without usage"),
        (Facts(200, finish_reason="stop", has_usage=True), Outcome.TRUNCATED,
         "the answer ended without [DONE]"),
    ],
)  # fmt: skip
def test_each_outcome_has_its_reason(facts: Facts, outcome: Outcome, reason: str | None) -> None:
    assert classify(facts, STREAM) == (outcome, reason)


def test_what_was_not_promised_is_not_missed() -> None:
    assert classify(Facts(200, finish_reason="stop"), Promises()) == (Outcome.OK, None)


def test_every_combination_has_the_first_outcome_that_fits() -> None:
    order = list(Outcome)
    for status, error, finish, timeout, lost, usage, last in product(
        (None, 200, 429, 500), (None, "e"), (None, "stop", "abort"), (None, "t"), (None, "l"),
        (False, True), (False, True),
    ):  # fmt: skip
        facts = Facts(status, "m", error, timeout, lost, finish, usage, last)
        fitting = {
            Outcome.OK: True,
            Outcome.SHED: status == 429,
            Outcome.ERROR_STATUS: status == 500,
            Outcome.IN_BAND_ERROR: bool(error) or finish == "abort",
            Outcome.TIMEOUT: bool(timeout),
            Outcome.CONNECTION_LOST: bool(lost),
            Outcome.TRUNCATED: not (finish and usage and last),
        }
        outcome, reason = classify(facts, STREAM)
        assert outcome is min((o for o in fitting if fitting[o]), key=order.index), facts
        assert (reason is None) == (outcome is Outcome.OK)


@pytest.mark.parametrize("kind", RequestKind)
def test_a_stream_promises_usage_and_its_last_event(kind: RequestKind) -> None:
    assert promises_of(kind, stream=True) == Promises(usage=True, last_event=LAST_EVENTS[kind])


def test_without_a_stream_usage_is_promised_where_the_api_requires_it() -> None:
    kinds = {kind for kind in RequestKind if promises_of(kind, stream=False).usage}
    assert kinds == {RequestKind.RESPONSES, RequestKind.MESSAGES}
    assert all(promises_of(kind, stream=False).last_event is None for kind in RequestKind)
