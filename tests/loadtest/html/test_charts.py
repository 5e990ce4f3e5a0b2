"""Charts show what the report says, and mark what is invalid."""

import pytest
from msgspec import structs

from tandem_loadtest.figures.distributions import of_values
from tandem_loadtest.figures.model import Event
from tandem_loadtest.html.charts import latency_cdf, layout, log_times, plain
from tandem_loadtest.html.page import pool
from tandem_loadtest.html.timeline import timeline_charts

from ..figures.samples import sample_repeat

VALUES = of_values([0.01, 0.02, 0.02, 0.05])


def test_cdf_rises_from_the_minimum_to_the_maximum() -> None:
    (trace,) = latency_cdf({"TTFT": VALUES, "ITL": None}).data
    assert trace["name"] == "TTFT"
    assert (trace["x"][0], trace["y"][0]) == (0.01, 0)
    assert (trace["x"][-1], trace["y"][-1]) == (0.05, 1)
    assert trace["y"] == sorted(trace["y"])
    assert trace["x"] == sorted(trace["x"])


def test_cdf_of_zeros_is_drawn_on_its_logarithmic_axis() -> None:
    (trace,) = latency_cdf({"ITL": of_values([0.0, 0.01])}).data
    assert min(trace["x"]) > 0


def test_cdf_marks_an_invalid_figure() -> None:
    assert VALUES is not None
    chart = latency_cdf({"TTFT": structs.replace(VALUES, invalid="the reason")})
    assert chart.data[0]["name"] == "TTFT (INVALID)"
    assert "TTFT is invalid: the reason." in chart.description
    assert chart.table.reasons == ["the reason"]


def test_cdf_without_values() -> None:
    chart = latency_cdf({"TTFT": None})
    assert chart.data == []
    assert "no values" in chart.description


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.012, 0.08), [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]),
        ((0.01, 3.0), [0.01, 0.1, 1.0, 10.0]),
    ],
)
def test_log_axis(values: tuple[float, ...], ticks: list[float]) -> None:
    assert log_times({}, values)["tickvals"] == pytest.approx(ticks)


def test_names_from_outside_are_short_and_without_markup() -> None:
    assert plain("<a href='x'>&") == "&lt;a href='x'&gt;&amp;"
    assert plain("") == "(empty)"
    assert len(plain("x" * 100)) == 40


def test_layouts_are_not_shared() -> None:
    assert layout("x", "y")["xaxis"] is not layout("x", "y")["xaxis"]


def test_pool_adds_the_buckets() -> None:
    more = of_values([0.1, 0.2])
    pooled = pool([VALUES, None, more])
    assert pooled is not None
    assert pooled.count == 6
    assert (pooled.minimum, pooled.maximum) == (0.01, 0.2)
    assert pooled.mean == pytest.approx(0.4 / 6)
    assert pooled.percentiles["50"] == pytest.approx(0.02, rel=pooled.relative_error)
    assert pool([None, VALUES]) is VALUES
    assert pool([None]) is None


def test_every_event_has_a_line_and_a_label_in_every_chart() -> None:
    repeat = sample_repeat()
    for chart in timeline_charts(repeat, "key"):
        labels = [(mark["text"], mark["x"]) for mark in chart.layout["annotations"]]
        assert labels == [("E1", 20.0), ("E2", 30.0)]
        lines = {shape["x0"] for shape in chart.layout["shapes"] if shape["type"] == "line"}
        assert lines == {20.0, 30.0}


def test_an_events_command_is_plain_in_its_label() -> None:
    event = Event(at=1.0, command="<b>", seconds=None, exit_status=None, output="")
    repeat = structs.replace(sample_repeat(count=50), events=[event])
    (label,) = timeline_charts(repeat, "key")[0].layout["annotations"]
    assert label["hovertext"] == "&lt;b&gt;"


def test_bars_add_up_intervals_without_losing_a_request() -> None:
    repeat = sample_repeat()
    line = repeat.timeline
    assert len(line.scheduled) > 60
    losses = timeline_charts(repeat, "key")[3]
    assert all(len(trace["y"]) <= 60 for trace in losses.data)
    assert sum(sum(trace["y"]) for trace in losses.data) == sum(map(sum, line.losses.values()))


def test_an_outcome_has_its_colour_whatever_else_was_lost() -> None:
    repeat = sample_repeat()
    counts = [1] * len(repeat.timeline.scheduled)

    def colour(*outcomes: str) -> str:
        line = structs.replace(repeat.timeline, losses=dict.fromkeys(outcomes, counts))
        (trace,) = [
            trace
            for trace in timeline_charts(structs.replace(repeat, timeline=line), "key")[3].data
            if trace["name"] == "timeout"
        ]
        return str(trace["marker"]["color"])

    assert colour("timeout") == colour("shed", "timeout", "unsent")


def test_small_groups_share_a_series() -> None:
    repeat = sample_repeat(count=50)
    length = len(repeat.timeline.scheduled)
    backends = {f"decode-{i}": [i + 1] * length for i in range(20)}
    line = structs.replace(repeat.timeline, backends=backends)
    chart = timeline_charts(structs.replace(repeat, timeline=line), "key")[5]
    assert [trace["name"] for trace in chart.data][-1] == "13 others"
    assert len(chart.data) == 8
    assert sum(sum(t["y"]) for t in chart.data) == sum(map(sum, backends.values()))


def test_latencies_over_time_are_marked_when_the_figure_is_invalid() -> None:
    repeat = sample_repeat(read_lag=0.0018)
    itl = timeline_charts(repeat, "key")[1]
    assert {trace["name"] for trace in itl.data} == {"p50 (INVALID)", "p99 (INVALID)"}
    assert itl.table.reasons
    assert not timeline_charts(sample_repeat(read_lag=0.0001), "key")[1].table.reasons
