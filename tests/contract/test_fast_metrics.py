from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tandem_contract.fast_metrics import CounterVec, HistogramVec

BOUNDS = (0.5, 1.0, 2.5)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 2.5, 3.0])))
def test_a_histogram_is_exported_like_prometheus_clients_own(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = HistogramVec("x", "Help.", BOUNDS, registry=ours).child()
    histogram = Histogram("x", "Help.", buckets=BOUNDS, registry=theirs)
    for value in values:
        fast.observe(value)
        histogram.observe(value)
    expected = [line for line in _lines(theirs) if "_created" not in line]
    assert _lines(ours) == expected


def test_folded_values_count_in_the_bucket_of_their_bound() -> None:
    fast = HistogramVec("x", "Help.", BOUNDS, registry=CollectorRegistry()).child()
    fast.fold(1.0, 3)
    fast.fold(float("inf"), 2)
    assert fast.cumulative() == [("0.5", 0), ("1.0", 3), ("2.5", 3), ("+Inf", 5)]


def test_beyond_its_limit_a_family_counts_other_labels_together() -> None:
    registry = CollectorRegistry()
    family = CounterVec("x_total", "Help.", ["a", "b"], registry=registry, limit=2)
    for name in "abcd":
        family.child(name, "z").inc()
    assert family.child("a", "z").value == 1
    assert registry.get_sample_value("x_total", {"a": "other", "b": "other"}) == 2


def test_a_child_is_created_once_and_exported_before_its_first_increment() -> None:
    registry = CollectorRegistry()
    family = CounterVec("x_total", "Help.", ["a"], registry=registry)
    child = family.child("y")
    assert family.child("y") is child
    assert registry.get_sample_value("x_total", {"a": "y"}) == 0


def _lines(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()
