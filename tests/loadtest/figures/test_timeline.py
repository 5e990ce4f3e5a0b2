"""Division of a run into intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_loadtest.figures.gaps import Gaps
from tandem_loadtest.figures.timeline import MOST_INTERVALS, Moments, interval_for, timeline
from tandem_loadtest.records import Outcome


def moments(
    end: float = 10.0, sent: list[float] | None = None, ended: list[float] | None = None
) -> Moments:
    return Moments(
        end=end, intended=sent or [], sent=sent or [], ended=ended or [], ttft_intended=[],
        ttft=[], losses={}, paths={}, backends={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [
        (0.05, 0.1), (12.0, 0.1), (12.1, 0.2), (24.0, 0.2), (24.1, 0.5), (60.0, 0.5), (61.0, 1.0),
        (130.0, 2.0), (241.0, 5.0), (601.0, 10.0), (1201.0, 20.0), (3600.0, 50.0),
    ],
)  # fmt: skip
def test_the_interval_is_round(seconds: float, interval: float) -> None:
    assert interval_for(seconds) == interval


@given(st.floats(12.1, 1e6))
def test_a_run_has_48_to_120_intervals(seconds: float) -> None:
    assert MOST_INTERVALS * 0.4 <= seconds / interval_for(seconds) <= MOST_INTERVALS


def test_values_are_in_their_interval() -> None:
    result = timeline(
        Moments(
            end=1.0,
            intended=[0.05, 0.06, 0.95],
            sent=[0.05, 0.06, 0.95],
            ended=[0.15, 0.25, 1.0],
            ttft_intended=[0.05, 0.06],
            ttft=[0.1, 0.2],
            losses={Outcome.TIMEOUT: [1.0]},
            paths={"unified": [0.15, 0.25, 1.0]},
            backends={"decode-0": [0.25]},
        ),
        Gaps(),
    )
    assert result.interval == 0.1
    assert result.scheduled == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert result.in_flight == [2, 2, 1, 0, 0, 0, 0, 0, 0, 1]
    assert result.ttft_p50 == [pytest.approx(0.15), *[None] * 9]
    assert result.ttft_p99 == [pytest.approx(0.199), *[None] * 9]
    assert result.itl_p50 == result.itl_p99 == [None] * 10
    assert result.losses == {"timeout": [0] * 9 + [1]}
    assert result.paths == {"unified": [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]}
    assert result.backends == {"decode-0": [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]}


def test_requests_after_the_end_are_left_out() -> None:
    result = timeline(moments(end=1.0, sent=[0.5, 1.5]), Gaps())
    assert sum(result.scheduled) == 1


def test_requests_that_do_not_end_stay_in_flight() -> None:
    assert timeline(moments(end=0.4, sent=[0.15]), Gaps()).in_flight == [0, 1, 1, 1]


def test_a_request_that_starts_when_another_ends_does_not_overlap_it() -> None:
    result = timeline(moments(end=0.4, sent=[0.05, 0.25], ended=[0.25, 0.35]), Gaps())
    assert result.in_flight == [1, 1, 1, 1]


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(0.001, 10)), min_size=1, max_size=30))
def test_in_flight_is_the_most_at_any_time_of_the_interval(
    requests: list[tuple[float, float]],
) -> None:
    spans = [(start, start + seconds) for start, seconds in requests]
    end = max(stop for _, stop in spans)
    result = timeline(moments(end, [s for s, _ in spans], [e for _, e in spans]), Gaps())
    most = max(sum(s <= time < e for s, e in spans) for time, _ in spans)
    assert max(result.in_flight) == most
    assert sum(result.scheduled) == len(requests)
    for i, level in enumerate(result.in_flight):
        at = (i + 0.5) * result.interval
        assert level >= sum(s <= at < e for s, e in spans)
