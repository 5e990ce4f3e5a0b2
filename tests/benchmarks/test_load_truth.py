"""The truth of a trial, and which reports differ from it."""

import pytest
from benchmarks.load_reports import Reported
from benchmarks.load_server import Served
from benchmarks.load_truth import Truth, mistakes, percentile, truth

RATE = 10.0


def answered(index: int, *, late: float = 0.0, ok: bool = True) -> Served:
    """Request `index` of a schedule that starts at 100 s: TTFT 0.2 s, ITL 0.05 s."""
    arrived = 100 + index / RATE + late
    return Served(arrived, ok, [arrived + 0.2, arrived + 0.25, arrived + 0.3])


def test_the_truth_counts_from_the_schedule_not_from_the_arrival() -> None:
    run = [answered(index, late=1.0 if index >= 5 else 0.0) for index in range(10)]
    true = truth(run, 10, RATE)
    assert (true.ok, true.failed) == (10, 0)
    assert true.ttft_p50 == pytest.approx(0.7)
    assert true.ttft_p95 == pytest.approx(1.2)
    assert true.ttft_p99 == pytest.approx(1.2)
    assert true.itl_p50 == pytest.approx(0.05)


def test_a_late_first_request_does_not_move_the_schedule() -> None:
    run = [answered(index, late=0.5 if index == 0 else 0.0) for index in range(10)]
    assert truth(run, 10, RATE).ttft_p99 == pytest.approx(0.7, abs=0.05)
    assert truth(run, 10, RATE).ttft_p50 == pytest.approx(0.2)


def test_a_tool_that_was_stopped_reads_the_first_token_at_the_end_of_the_pause() -> None:
    run = [answered(index) for index in range(10)]
    # The first tokens of the requests 1, 2 and 3 are written meanwhile, at 100.3, 100.4, 100.5 s.
    stopped = truth(run, 10, RATE, pause=(100.25, 100.55))
    assert stopped.ttft_p95 > 0.35
    assert stopped.ttft_p50 == pytest.approx(0.2)
    assert truth(run, 10, RATE).ttft_p95 == pytest.approx(0.2)


def test_failed_and_missing_requests_count_as_failed() -> None:
    run = [answered(0), answered(1, ok=False), answered(2)]
    true = truth(run, 4, RATE)
    assert (true.ok, true.failed) == (2, 2)


def test_probes_before_the_run_do_not_count() -> None:
    probe = Served(1.0, ok=True, tokens=[1.1, 1.2])
    assert truth([probe, answered(0), answered(1)], 2, RATE) == truth(
        [answered(0), answered(1)], 2, RATE
    )


def test_a_run_without_a_good_answer_has_no_truth() -> None:
    with pytest.raises(ValueError, match="no good answer"):
        truth([answered(0, ok=False)], 1, RATE)


def test_percentiles_are_interpolated() -> None:
    assert percentile(range(101), 99) == pytest.approx(99)
    assert percentile([3.0], 99) == 3.0


TRUE = Truth(ok=160, failed=40, ttft_p50=0.1, ttft_p95=1.0, ttft_p99=2.0, itl_p50=0.02)


@pytest.mark.parametrize(
    ("reported", "wrong"),
    [
        (Reported(160, 40, 0.1, 1.0, 2.0, 0.02), []),
        (Reported(160, 40, 0.109, 0.91, 9.0, 0.024), []),
        (Reported(200, 0, 0.1, 1.0, 2.0, 0.02), ["ok", "failed"]),
        (Reported(160, 40, 0.1, 0.1, 2.0, 0.02), ["ttft_p95"]),
        (Reported(160, 40, None, 1.0, 2.0, 0.03), ["ttft_p50", "itl_p50"]),
    ],
)
def test_mistakes_are_named(reported: Reported, wrong: list[str]) -> None:
    assert mistakes(reported, TRUE) == wrong
