"""Aggregation of several workers' admin answers."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem_sidecar.process import aggregate


def page(amount: float, *labels: str) -> str:
    registry = CollectorRegistry()
    counter = Counter("asked", "Asked.", ["path"], registry=registry)
    for label in labels:
        counter.labels(label).inc(amount)
    Gauge("running", "Running.", registry=registry).set(amount)
    Histogram("took", "Took.", buckets=(1, 10), registry=registry).observe(amount)
    return generate_latest(registry).decode()


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_parsed_page_is_formatted_unchanged() -> None:
    original = page(2, "a", "with space")
    reformatted = aggregate.format_page(aggregate.parse_page(original))
    assert samples(reformatted) == samples(original.encode())
    assert reformatted.decode().count("# ") == original.count("# ")


def test_samples_are_summed() -> None:
    first, second = aggregate.parse_page(page(2, "a")), aggregate.parse_page(page(5, "b", "a"))
    summed = samples(aggregate.format_page(aggregate.sum_pages([first, second])))
    assert summed["asked_total", "a"] == 7
    assert summed["asked_total", "b"] == 5
    assert summed["running",] == 7
    assert summed["took_bucket", "1.0"] == 0
    assert summed["took_bucket", "10.0"] == 2
    assert (summed["took_count",], summed["took_sum",]) == (2, 7)


def test_the_start_of_several_processes_is_the_first() -> None:
    pages = [
        aggregate.parse_page(
            f"# HELP process_start_time_seconds S.\n# TYPE process_start_time_seconds gauge\n"
            f"process_start_time_seconds {started}\n"
        )
        for started in (30.0, 10.0, 20.0)
    ]
    summed = samples(aggregate.format_page(aggregate.sum_pages(pages)))
    assert summed["process_start_time_seconds",] == 10


def test_counters_of_an_exited_worker_are_kept_and_its_gauges_are_not() -> None:
    summed = samples(
        aggregate.format_page(aggregate.cumulative_families(aggregate.parse_page(page(3, "a"))))
    )
    assert summed["asked_total", "a"] == 3
    assert summed["took_count",] == 1
    assert ("running",) not in summed


def test_states_are_merged() -> None:
    states = {
        7: {"draining": False, "engine_healthy": True, "in_flight": [{"request_id": "a"}]},
        8: {"draining": False, "engine_healthy": False, "in_flight": [], "breakers": {"p": "open"}},
    }
    assert aggregate.merge_states(states, draining=False) == {
        "draining": False,
        "engine_healthy": False,
        "in_flight": [{"request_id": "a"}],
        "workers": [
            {"pid": 7, "in_flight": 1},
            {"pid": 8, "in_flight": 0, "breakers": {"p": "open"}},
        ],
    }
    assert aggregate.merge_states({}, draining=True)["engine_healthy"] is False


def test_traces_are_merged_in_order_of_time() -> None:
    late, early = {"received": 9.0}, {"received": 1.0}
    assert aggregate.merge_traces([[late], [], [early]]) == [early, late]
