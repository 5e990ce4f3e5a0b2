"""Answers of unknown length count as those that ended before them did, and by what they have."""

import pytest

from tandem_contract.timing import Timing
from tandem_epp.estimates.answer_lengths import (
    LengthClasses,
    RunningAnswer,
    RunningAnswers,
)
from tandem_epp.estimates.pod_estimates import PodEstimates
from tandem_epp.estimates.request_load import PlacedPrompt, RequestLoad
from tandem_planner.cost import SHORT_ANSWER
from tandem_planner.objective import ITL_WEIGHT

SHORT, LONG = 5.0, 500.0
SIZE = PlacedPrompt(prompt=2000, output=LONG, is_stream=True)


def learned(classes: LengthClasses, limit: int = 0) -> LengthClasses:
    """Every second answer is short."""
    for _ in range(1000):
        classes.with_limit(limit, LONG).add(SHORT)
        classes.with_limit(limit, LONG).add(LONG)
    return classes


def test_nothing_learned_an_answer_has_the_expected_length() -> None:
    assert LengthClasses().with_limit(0, LONG).shares[0] == pytest.approx(1 / LONG)
    assert LengthClasses().with_limit(1, 1.0).shares[0] == 0.0, "one token has no ITL"


def test_the_mean_counts_of_shares_and_not_of_lengths() -> None:
    shares = learned(LengthClasses()).with_limit(0, LONG).shares
    assert shares[0] == pytest.approx((1 / SHORT_ANSWER + 1 / LONG) / 2, rel=0.01)
    assert shares[1] == pytest.approx(1 / LONG), "no short one is left"
    assert shares[-1] == pytest.approx(2.0 / (SHORT_ANSWER * 2 ** (len(shares) - 1)))


def test_requests_with_limits_of_other_powers_of_two_are_counted_apart() -> None:
    classes = learned(LengthClasses(), limit=4096)
    assert classes.with_limit(5000, LONG).shares[0] > 10 / LONG
    assert classes.with_limit(0, LONG).shares[0] == pytest.approx(1 / LONG)
    assert classes.with_limit(10**30, LONG) is classes.with_limit(10**40, LONG)


def test_new_answers_outweigh_old_ones() -> None:
    lengths = learned(LengthClasses()).with_limit(0, LONG)
    for _ in range(10_000):
        lengths.add(LONG)
    assert lengths.shares[0] == pytest.approx(1 / LONG, rel=0.05)


def test_an_answer_that_has_many_tokens_is_no_longer_taken_for_a_short_one() -> None:
    lengths = learned(LengthClasses()).with_limit(0, LONG)
    running, answer, gone = RunningAnswers(), RunningAnswer(lengths), RunningAnswer(lengths)
    for each in (answer, gone):
        running.add(each)
        running.begin(each)
    assert running.total == pytest.approx(2 * lengths.shares[0])
    assert not running.advance(1.0, 0.1)
    assert running.advance(3.0, 0.1)
    assert running.total == pytest.approx(2 * lengths.shares[1])
    running.remove(gone)
    running.remove(gone)
    assert running.total == pytest.approx(lengths.shares[1])
    assert running.advance(1000.0, 0.1)
    assert running.total == pytest.approx(lengths.shares[-1])
    running.remove(answer)
    assert running.total == 0.0


def serve(pod: PodEstimates, tokens: int, now: float, *, beside: float = 0.0) -> None:
    """An answer of `tokens` tokens, delayed by a prefill that takes `beside` seconds."""
    load = RequestLoad(pod, None, SIZE, now)
    load.on_response(now + 0.2, Timing(compute=0.2))
    other = RequestLoad(pod, None, SIZE, now + 0.2) if beside else None
    if other is not None:
        other.on_response(now + 0.2 + beside, Timing(compute=beside))
    load.end(now + 0.2 + beside + tokens * pod.best_decode.step)
    if other is not None:
        other.end(now + 0.2 + beside + LONG)


@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_lengths_are_learned_by_the_time_that_answers_take_beside_prefills(beside: float) -> None:
    pod = PodEstimates()
    for i in range(200):
        serve(pod, 10, 10.0 + 1000 * i, beside=beside)
    RequestLoad(pod, None, SIZE, 1e6)
    long = 1 if beside else 0
    share = (1 / SHORT_ANSWER) / (1 + long)
    assert pod.figures(1e6).stall == pytest.approx(ITL_WEIGHT * share, rel=0.1)


def test_whole_answers_tell_their_length() -> None:
    pod = PodEstimates()
    for i in range(200):
        size = PlacedPrompt(prompt=2000, output=LONG)
        load = RequestLoad(pod, None, size, 10.0 * i)
        load.on_response(10.0 * i + 1, Timing(leg=1.0, generated=10))
        load.end(10.0 * i + 1)
    RequestLoad(pod, None, SIZE, 1e6)
    assert pod.figures(1e6).stall == pytest.approx(ITL_WEIGHT / SHORT_ANSWER, rel=0.1)
