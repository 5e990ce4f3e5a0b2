from tandem_cli.demo.outcome import REQUIRED_PATHS, PathFigures, judge, summarize, table, verdict
from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Answer, Call, Result
from tandem_loadtest.scrape import Counters

CALL = Call("hello", max_tokens=3)
EXPECTED = Answer("abc", (1, 2, 3), "length")
COUNTERS = Counters(kv_bytes=4096, transfers=2, transfer_seconds=0.5)


def result(path: RoutingPath | None, *tokens: int, error: str | None = None) -> Result:
    answer = Answer("", tokens, "length")
    return Result(CALL, 200, path, "p", "d", answer, error, sent=0.0, first_token=0.1)


def results_on(*paths: RoutingPath) -> list[Result]:
    return [result(path, 1, 2, 3) for path in paths]


def test_all_paths_and_equal_answers_are_success() -> None:
    outcome = judge(results_on(*REQUIRED_PATHS), [EXPECTED] * 3, COUNTERS, required=REQUIRED_PATHS)
    assert outcome.status == 0
    assert verdict(outcome) == ["3 of 3 answers equal a single engine's, token for token."]


def test_a_missing_path_fails() -> None:
    outcome = judge(
        results_on(*REQUIRED_PATHS[:2]), [EXPECTED] * 2, COUNTERS, required=REQUIRED_PATHS
    )
    assert outcome.status == 1
    assert outcome.missing == (RoutingPath.UNIFIED,)
    assert "no request took the path unified" in verdict(outcome)


def test_a_path_that_is_not_required_may_be_missing() -> None:
    outcome = judge(results_on(RoutingPath.UNIFIED), [EXPECTED], COUNTERS, required=())
    assert outcome.status == 0


def test_a_mismatch_fails_and_names_the_first_differing_token() -> None:
    results = [result(RoutingPath.UNIFIED, 1, 9, 3)]
    outcome = judge(results, [EXPECTED], COUNTERS, required=())
    assert outcome.status == 1
    (mismatch,) = outcome.mismatches
    assert mismatch.position == 1
    assert str(mismatch) == "unified (p → d): token 1: (9, 3) instead of (2, 3)"


def test_a_short_answer_and_one_without_tokens_differ() -> None:
    results = [result(RoutingPath.UNIFIED, 1, 2), result(RoutingPath.UNIFIED)]
    outcome = judge(results, [EXPECTED, Answer("", (), "length")], COUNTERS, required=())
    assert [m.position for m in outcome.mismatches] == [2, 0]


def test_a_failure_of_the_stack_or_the_single_engine_fails() -> None:
    results = [result(None, error="HTTP 502: gone"), *results_on(RoutingPath.UNIFIED)]
    outcome = judge(results, [EXPECTED, None], COUNTERS, required=())
    assert outcome.status == 1
    assert len(outcome.failures) == 2
    assert any("HTTP 502: gone" in line for line in verdict(outcome))


def timed(path: RoutingPath | None, ttft: float | None, *gaps: float, error: str = "") -> Result:
    return Result(
        CALL, 200, path, sent=1.0, first_token=None if ttft is None else 1.0 + ttft, gaps=gaps,
        error=error or None,
    )  # fmt: skip


def test_results_are_summed_up_by_path() -> None:
    fast, split = RoutingPath.FAST_DECODE, RoutingPath.PREFILL_THEN_DECODE
    summary = summarize(
        [
            timed(split, 1.0, 0.25, 0.75),
            timed(fast, 0.5, 0.25),
            timed(split, 3.0),
            timed(split, None),
            timed(split, 99.0, 99.0, error="broke off"),
            timed(None, None, error="no route"),
        ]
    )
    assert summary == {
        "fast_decode": PathFigures(1, 0, 0.5, 0.5, 0.25, 0.25),
        "prefill_then_decode": PathFigures(4, 1, 2.0, 2.98, 0.5, 0.745),
        "unrouted": PathFigures(1, 1, None, None, None, None),
    }
    assert list(summary) == sorted(summary)


def test_json_has_the_documented_shape() -> None:
    outcome = judge(results_on(*REQUIRED_PATHS), [EXPECTED] * 3, COUNTERS, required=REQUIRED_PATHS)
    data = outcome.to_json()
    assert data["mismatches"] == 0
    assert data["failed"] == 0
    paths = data["paths"]
    assert isinstance(paths, dict)
    split = paths["prefill_then_decode"]
    assert split["requests"] == 1
    assert split["ttft_p50"] == 0.1
    assert split["kv_bytes"] == 4096
    assert split["kv_transfer_seconds"] == 0.5
    assert paths["unified"]["kv_bytes"] == 0


def test_the_table_has_a_row_per_path() -> None:
    assert (
        table(
            judge(results_on(*REQUIRED_PATHS), [EXPECTED] * 3, COUNTERS, required=REQUIRED_PATHS)
        ).row_count
        == 3
    )
