import pytest

from tandem_contract.metrics_page import MetricsPage

PAGE = """\
# TYPE requests counter
requests_total{path="a",pod="x"} 1.0
requests_total{path="a",pod="y"} 2.0
requests_total{path="b"} 4.0
# TYPE info gauge
info{version="1"} 1.0
info{version="2"} 1.0
"""


def test_samples_are_summed_by_name_and_by_label() -> None:
    page = MetricsPage.parse(PAGE)
    assert page.totals == {"requests_total": 7.0, "info": 2.0}
    assert page.totals_by_label("requests_total", "path") == {"a": 3.0, "b": 4.0}
    assert page.totals_by_label("requests_total", "pod") == {"x": 1.0, "y": 2.0, "": 4.0}
    assert page.totals_by_label("absent", "path") == {}


def test_labels_of_an_info_metric() -> None:
    page = MetricsPage.parse(PAGE)
    assert page.labels("info") == {"version": "2"}
    assert page.labels("absent") == {}


def test_a_page_in_another_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        MetricsPage.parse("<html>{")


def test_counters_and_gauges_are_told_apart_by_their_types() -> None:
    page = MetricsPage.parse(
        "# TYPE sent_total counter\n"
        'sent_total{pod="x"} 3\n'
        'sent_total{pod="y"} 4\n'
        "# TYPE sent_created gauge\n"
        "sent_created 1.7e9\n"
        "# TYPE queue gauge\n"
        "queue 5\n"
        "# TYPE seconds histogram\n"
        'seconds_bucket{le="+Inf"} 2\n'
        "seconds_sum 1.5\n"
        "seconds_count 2\n"
    )
    assert page.counters == {"sent_total": 7.0, "seconds_sum": 1.5, "seconds_count": 2.0}
    assert page.gauges == {"queue": 5.0}
