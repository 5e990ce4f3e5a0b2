"""Figures of a run against a plain recomputation from its records."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given

from tandem_loadtest.figures.collector import MOST_FAILURES, Collector
from tandem_loadtest.figures.compare import within_run
from tandem_loadtest.figures.histogram import Histogram
from tandem_loadtest.figures.intervals import summary_values
from tandem_loadtest.figures.model import Distribution, Figures, Repeat, Slo, Stall
from tandem_loadtest.records import Outcome, Record

from .records import answer, records
from .samples import sample_repeat

SLO = Slo(ttft=2.0, itl=1.5, e2e=12.0)


def repeat_of(
    added: Iterable[Record], *, slo: Slo | None = SLO, read_lag: Sequence[float] = (), **fields: Any
) -> Repeat:
    collector, lag = Collector(slo), Histogram()
    for record in added:
        collector.add(record)
    lag.add_all(read_lag)
    values = {"started": "2026-01-01T00:00:00Z", "seconds": 10.0, "cpu_share": []}
    return collector.repeat(**(values | {"read_lag": lag} | fields))


def check(distribution: Distribution | None, values: list[float]) -> None:
    """Compare a distribution with all of its values."""
    if not values:
        assert distribution is None
        return
    assert distribution is not None
    assert distribution.count == len(values) == sum(n for _, n in distribution.buckets)
    assert distribution.minimum == min(values)
    assert distribution.maximum == max(values)
    assert distribution.mean == pytest.approx(fmean(values))


def check_figures(figures: Figures, group: list[Record]) -> None:
    """Compare the figures of a group with its records."""
    ok = [r for r in group if r.outcome in (Outcome.OK, Outcome.DIFFERS)]
    assert figures.lost == len(group) - len(ok)
    first = [(r, r.first_token) for r in ok if r.first_token is not None]
    ended = [(r, r.ended) for r in ok if r.ended is not None]
    assert figures.requests == len(group) == sum(figures.outcomes.values())
    assert figures.outcomes == Counter(str(r.outcome) for r in group)
    check(figures.ttft, [t - r.intended for r, t in first])
    check(figures.ttft_wire, [t - (r.sent or 0) for r, t in first])
    check(figures.itl, [gap for r, _ in first for gap in r.gaps])
    check(
        figures.tpot,
        [
            ((r.last_token or 0) - t) / (r.output_tokens - 1)
            for r, t in first
            if r.output_tokens and r.output_tokens > 1
        ],
    )
    check(figures.e2e, [t - r.intended for r, t in ended])
    check(figures.e2e_wire, [t - (r.sent or 0) for r, t in ended])
    assert figures.prompt_tokens == sum(r.prompt_tokens or 0 for r in ok)
    assert figures.output_tokens == sum(r.output_tokens or 0 for r in ok)
    cached = [r.cached_tokens for r in ok if r.cached_tokens is not None]
    assert figures.cached_tokens == (sum(cached) if cached else None)


def grouped(added: list[Record], field: str, default: str = "") -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in added:
        if name := getattr(record, field) or default:
            groups.setdefault(name, []).append(record)
    return groups


@given(records())
def test_figures_equal_those_recomputed(added: list[Record]) -> None:
    repeat = repeat_of(added)
    check_figures(repeat.all, added)
    models = grouped(added, "model")
    for figures, groups in (
        (repeat.paths, grouped(added, "path", "unrouted")),
        (repeat.prefill_backends, grouped(added, "prefill_backend")),
        (repeat.decode_backends, grouped(added, "decode_backend")),
        (repeat.models, models if len(models) > 1 else {}),
    ):
        assert list(figures) == sorted(groups)
        for name, group in groups.items():
            check_figures(figures[name], group)


@given(records())
def test_rates_are_of_complete_answers(added: list[Record]) -> None:
    rates, figures = repeat_of(added).rates, repeat_of(added).all
    ok = figures.outcomes.get("ok", 0) + figures.outcomes.get("differs", 0)
    assert rates.scheduled == len(added) / 10
    assert (rates.due, rates.lost) == (len(added), len(added) - ok)
    assert rates.requests == ok / 10
    assert rates.output_tokens == figures.output_tokens / 10
    assert rates.total_tokens == (figures.prompt_tokens + figures.output_tokens) / 10
    assert figures.within_slo is not None
    assert figures.within_slo <= ok
    assert rates.goodput == figures.within_slo / 10
    if added:
        assert rates.attainment == figures.within_slo / len(added)


@given(records())
def test_the_timeline_has_every_request(added: list[Record]) -> None:
    timeline = repeat_of(added).timeline
    ended = [r for r in added if r.ended is not None]
    assert sum(timeline.scheduled) == len(added)
    assert {k: sum(v) for k, v in timeline.losses.items()} == Counter(
        str(r.outcome) for r in added if r.outcome not in (Outcome.OK, Outcome.DIFFERS)
    )
    assert sum(sum(counts) for counts in timeline.paths.values()) == len(ended)
    assert {name: sum(counts) for name, counts in timeline.backends.items()} == Counter(
        r.decode_backend for r in ended if r.decode_backend
    )
    intervals = len(timeline.scheduled)
    for values in (timeline.in_flight, timeline.ttft_p99, timeline.itl_p50, timeline.itl_p99):
        assert len(values) == intervals


@given(records())
def test_the_longest_stall_is_of_any_client(added: list[Record]) -> None:
    waits = [(gap, "next token", r.index) for r in added for gap in r.gaps]
    for r in added:
        if r.sent is not None and r.ended is not None:
            received = r.ended if r.first_token is None else r.first_token
            waits.append((received - r.sent, "first token", r.index))
            if r.last_token is not None:
                waits.append((r.ended - r.last_token, "end", r.index))
    stall = repeat_of(added).stall
    longest = max((seconds for seconds, _, _ in waits), default=0.0)
    if not longest:
        assert stall is None
        return
    assert stall is not None
    assert stall.seconds == longest
    assert (stall.seconds, stall.phase, stall.request) in waits


@given(records())
def test_failures_have_every_loss(added: list[Record]) -> None:
    failures = repeat_of(added).failures
    lost = [(str(r.outcome), r.error) for r in added if r.outcome is not Outcome.OK]
    assert {(f.outcome, f.reason): f.count for f in failures if f.outcome != "others"} == dict(
        Counter(lost).most_common(MOST_FAILURES)
    )
    assert sum(failure.count for failure in failures) == len(lost)


@pytest.mark.parametrize(
    ("record", "stall"),
    [
        (answer(7, ttft=2.0), Stall(seconds=2.0, at=1.0, phase="first token", request=7)),
        (answer(7, gaps=(0.1, 0.9)), Stall(seconds=0.9, at=1.6, phase="next token", request=7)),
        (answer(7, gaps=(), ended=9.0), Stall(seconds=7.5, at=1.5, phase="end", request=7)),
        # Lost, or not streamed: there is no token.
        (
            Record(7, 1.0, Outcome.TIMEOUT, sent=1.0, ended=301.0),
            Stall(seconds=300.0, at=1.0, phase="first token", request=7),
        ),
        (
            Record(7, 1.0, Outcome.OK, sent=1.0, ended=4.0),
            Stall(seconds=3.0, at=1.0, phase="first token", request=7),
        ),
    ],
)
def test_a_stall_says_when_it_began_and_what_the_client_waited_for(
    record: Record, stall: Stall
) -> None:
    assert repeat_of([answer(3), record, answer(4)]).stall == stall


def test_a_request_that_was_not_sent_waits_for_nothing() -> None:
    assert repeat_of([Record(0, 1.0, Outcome.UNSENT)]).stall is None


@pytest.mark.parametrize("reasons", [30, 1500])
def test_rare_reasons_are_counted_together(reasons: int) -> None:
    lost = [
        Record(i, 0.0, Outcome.TIMEOUT, f"reason {number}")
        for i, number in enumerate([*range(reasons), *range(reasons - 1, -1, -1), 0])
    ]
    failures = repeat_of(lost).failures
    assert len(failures) == MOST_FAILURES + 1
    assert (failures[0].reason, failures[0].count) == ("reason 0", 3)
    assert failures[-1].outcome == "others"
    assert sum(failure.count for failure in failures) == len(lost)


def test_requests_that_a_stopped_run_did_not_send_are_not_in_its_timeline() -> None:
    unsent = [Record(i, 100.0 * i, Outcome.UNSENT, "stopped") for i in range(1, 5)]
    repeat = repeat_of([answer(), *unsent], stopped_at=10.0)
    assert repeat.timeline.interval == 0.1
    assert sum(repeat.timeline.scheduled) == 1
    assert sum(repeat.timeline.losses["unsent"]) == 0
    assert repeat.all.outcomes == {"ok": 1, "unsent": 4}
    assert repeat.stopped


def test_rates_of_a_stopped_run_are_of_the_requests_whose_time_came_before_the_stop() -> None:
    # Two of four were due: one went beyond --max-in-flight or was cut off.
    unsent = [Record(i, at, Outcome.UNSENT, "stopped") for i, at in enumerate((2.0, 4.1, 90.0))]
    repeat = repeat_of([answer(), *unsent], seconds=4.0, stopped_at=4.0)
    rates = repeat.rates
    assert (rates.due, rates.lost, rates.scheduled, rates.attainment) == (2, 1, 0.5, 0.5)
    summary = summary_values(repeat, None)
    assert summary["lost_share"].value == 0.5
    share = within_run("lost_share", repeat, None)
    assert share is not None
    assert share.low < 0.5 < share.high
    # A run that was not stopped was late with them, or had reached a limit.
    assert repeat_of([answer(), *unsent]).rates.due == 4


def test_a_late_generator_invalidates_figures_from_the_intended_time() -> None:
    figures = repeat_of([answer(late=0.2, ttft=0.3, gaps=(0.5,))]).all
    assert figures.ttft is not None
    assert figures.ttft_wire is not None
    assert "send lateness p99 of 200 ms exceeds 25 ms" in (figures.ttft.invalid or "")
    assert figures.ttft_wire.invalid is None


def test_a_read_lag_invalidates_the_figures_that_are_short_beside_it() -> None:
    figures = repeat_of([answer(ttft=1.0, gaps=(0.02, 0.02))], read_lag=[0.004]).all
    assert figures.itl is not None
    assert figures.tpot is not None
    assert figures.ttft is not None
    assert "read lag p99 of 4 ms exceeds 1 ms" in (figures.itl.invalid or "")
    assert figures.tpot.invalid == figures.itl.invalid
    assert figures.ttft.invalid is None


def test_the_generator_reports_on_itself() -> None:
    generator = repeat_of(
        [answer(late=0.25), answer(late=-1e-9), Record(2, 0.0, Outcome.UNSENT)],
        read_lag=[0.001],
        cpu_share=[0.5, 0.97],
        warnings=["file descriptors are few"],
    ).generator
    assert generator.lateness is not None
    assert (generator.lateness.count, generator.lateness.minimum) == (2, 0)
    assert generator.lateness.maximum == 0.25
    assert generator.read_lag is not None
    assert generator.read_lag.count == 1
    assert generator.warnings == [
        "file descriptors are few",
        "1 of 2 worker processes used 97% of a CPU core: the load generator may be the "
        "bottleneck; raise --processes",
    ]


def test_requests_that_were_sent_again_are_counted_and_warned_of() -> None:
    lost = answer(outcome=Outcome.CONNECTION_LOST, error="closed", resent=1)
    repeat = repeat_of([answer(resent=1), answer(), lost])
    assert (repeat.all.requests, repeat.generator.resent) == (3, 2)
    assert repeat.generator.warnings == [
        "2 requests were sent again because their kept-alive connection had been closed by the "
        "server"
    ]


def test_a_run_without_requests_has_no_figures() -> None:
    repeat = repeat_of([])
    assert repeat.all == Figures(requests=0, outcomes={}, within_slo=0)
    assert repeat.rates.attainment is None
    assert repeat.generator.lateness is None
    assert repeat.stall is None


def test_a_run_needs_a_duration() -> None:
    with pytest.raises(ValueError, match="0 seconds"):
        repeat_of([], seconds=0)


def test_a_repeat_can_be_made_again_with_more_records() -> None:
    collector = Collector()
    for count in (1, 2):
        collector.add(answer(count))
        repeat = collector.repeat(started="", seconds=9, read_lag=Histogram(), cpu_share=[])
        assert repeat.all.requests == count
        assert repeat.all.itl is not None
        assert repeat.all.itl.count == 2 * count


def test_the_sample_has_all_that_a_report_may_have() -> None:
    repeat = sample_repeat(read_lag=0.002)
    assert set(repeat.all.outcomes) == set(Outcome)
    assert repeat.events
    assert repeat.models
    assert repeat.all.itl is not None
    assert repeat.all.itl.invalid
