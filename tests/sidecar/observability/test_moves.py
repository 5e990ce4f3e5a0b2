"""What a request's moves came to, by its legs."""

import msgspec
import pytest

from tandem_contract.trace import MoveTrace
from tandem_sidecar.observability.logs import request_fields
from tandem_sidecar.observability.metrics import Metrics
from tandem_sidecar.observability.moves import MoveCause, MoveResult, move_reports
from tandem_sidecar.observability.observer import RequestObserver, to_trace
from tandem_sidecar.observability.record import NO_ENGINE, MoveMethod, Phase, Record, Result

from .records import RECEIVED, end_record, record


def left(result: Result = Result.LOST) -> Record:
    """A request whose first engine ended so."""
    made = record()
    made.leg(Phase.PREFILL, "p-0", "a", RECEIVED).end(Result.ANSWERED, RECEIVED + 1)
    made.leg(Phase.DECODE, "d-0", "a", RECEIVED + 1).end(result, RECEIVED + 2)
    return made


def moved(result: Result | None = Result.ANSWERED, status: int | None = None) -> Record:
    """A request that went on at another engine, whose leg ended so."""
    made = left()
    move = made.begin_move(
        MoveMethod.CONTINUED, delivered=7, seam=6, prompt=100, last_byte=RECEIVED + 1.75
    )
    leg = made.leg(Phase.DECODE, "d-1", "b", RECEIVED + 2)
    if result is Result.ANSWERED:
        move.resumed = RECEIVED + 2.25
    if result is not None:
        leg.end(result, RECEIVED + 3, status=status)
    return made


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (Result.LOST, MoveCause.CRASH),
        (Result.UNREACHABLE, MoveCause.CRASH),
        (Result.SILENT, MoveCause.SILENCE),
        (Result.DEADLINE, MoveCause.DEADLINE),
        (Result.ERROR, MoveCause.ERROR),
        (Result.BUSY, MoveCause.ERROR),
        (Result.ABORTED, MoveCause.DRAIN),
    ],
)
def test_the_cause_is_how_the_leg_before_ended(result: Result, cause: MoveCause) -> None:
    made = left(result)
    made.begin_move(MoveMethod.BEGUN_AGAIN)
    [report] = move_reports(made)
    assert report.cause is cause


def test_what_was_at_no_engine_yet_moves_because_of_a_drain() -> None:
    made = record()
    made.leg(Phase.PREFILL, "p-0", "a", RECEIVED).end(Result.ABORTED, RECEIVED + 1)
    made.begin_move(MoveMethod.BEGUN_AGAIN)
    [report] = move_reports(made)
    assert (report.cause, report.source) == (MoveCause.DRAIN, "")


@pytest.mark.parametrize(
    ("result", "status", "expected"),
    [
        (Result.ANSWERED, 200, MoveResult.DONE),
        (Result.BUSY, 503, MoveResult.REFUSED),
        (Result.REJECTED, 404, MoveResult.REFUSED),
        (Result.ERROR, 500, MoveResult.REFUSED),
        (Result.ERROR, 200, MoveResult.FAILED),
        (Result.LOST, None, MoveResult.FAILED),
        (Result.DIFFERED, 200, MoveResult.DIFFERED),
        (Result.ABORTED, None, MoveResult.ABANDONED),
        (None, None, None),
    ],
)
def test_the_result_is_how_the_leg_after_it_ended(
    result: Result | None, status: int | None, expected: MoveResult | None
) -> None:
    [report] = move_reports(moved(result, status))
    assert report.result is expected
    assert (report.source, report.target) == ("d-0", "d-1")


def test_a_stream_that_moves_twice_has_two_reports() -> None:
    made = moved(Result.BUSY, 503)
    move = made.begin_move(MoveMethod.AGAIN, delivered=7, last_byte=RECEIVED + 1.75)
    made.leg(Phase.DECODE, "d-2", "c", RECEIVED + 3).end(Result.ANSWERED, RECEIVED + 9)
    move.resumed = RECEIVED + 5
    first, second = move_reports(made)
    assert (first.cause, first.result, first.target) == (
        MoveCause.CRASH,
        MoveResult.REFUSED,
        "d-1",
    )
    assert (second.cause, second.result, second.target) == (
        MoveCause.ERROR,
        MoveResult.DONE,
        "d-2",
    )
    assert (first.gap, second.gap) == (None, 3.25)


@pytest.mark.parametrize(
    ("why", "outcome", "expected"),
    [
        (NO_ENGINE, "cut", MoveResult.NO_ENGINE),
        (NO_ENGINE, "failed", MoveResult.NO_ENGINE),
        ("presence_penalty is not continued", "cut", MoveResult.IMPOSSIBLE),
        # Nothing was delivered, so that it could have begun again.
        ("presence_penalty is not continued", "failed", None),
        ("presence_penalty is not continued", "answered", None),
        (NO_ENGINE, "abandoned", None),
        ("", "cut", None),
    ],
)
def test_a_request_that_could_not_move_says_why(
    why: str, outcome: str, expected: MoveResult | None
) -> None:
    made = end_record(left(), outcome)
    made.not_resumed = why
    reports = [*move_reports(made)]
    assert [report.result for report in reports] == ([] if expected is None else [expected])
    assert all(report.why == why for report in reports)


def test_another_answer_is_told_once() -> None:
    made = end_record(moved(Result.DIFFERED, 200), "cut")
    made.not_resumed = "another engine generates another answer"
    [report] = move_reports(made)
    assert report.result is MoveResult.DIFFERED


async def test_moves_are_counted_with_their_gap_and_their_tokens() -> None:
    metrics = Metrics()
    observer = RequestObserver(metrics)
    for made in (moved(), moved(Result.LOST)):
        observer.on_request_start(made)
        observer.on_request_end(end_record(made))
    observer.catch_up()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"tandem_sidecar_stream_{name}", labels)

    of_both = {"cause": "crash", "method": "continued"}
    assert value("moves_total", **of_both, result="done") == 1
    assert value("moves_total", **of_both, result="failed") == 1
    assert value("moves_total", cause="drain", method="none", result="no_engine") == 0
    assert value("gap_seconds_count", cause="crash") == 1
    assert value("gap_seconds_sum", cause="crash") == 0.5
    assert value("recomputed_tokens_total", method="continued") == 2 * 107


def test_trace_and_log_line_have_the_moves() -> None:
    made = end_record(moved())
    assert to_trace(made).moves == (
        MoveTrace(2, "crash", "continued", "done", "d-0", "d-1", 7, 6, 107, gap=0.5),
    )
    assert request_fields(made)["moves"] == [
        {
            "cause": "crash",
            "method": "continued",
            "result": "done",
            "source": "d-0",
            "target": "d-1",
            "delivered": 7,
            "gap": 0.5,
        }
    ]
    assert "moves" not in request_fields(end_record(left()))
    assert b"moves" not in msgspec.json.encode(to_trace(end_record(left())))
