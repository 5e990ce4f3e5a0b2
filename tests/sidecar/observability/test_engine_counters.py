import asyncio
import time
from math import inf

import pytest
from prometheus_client import generate_latest

from tandem_contract import metrics as names
from tandem_contract import vllm_storage
from tandem_contract.commandline import HostPort
from tandem_contract.paths import ErrorPhase
from tandem_engine.metrics import EngineMetrics
from tandem_engine.types import PullResult
from tandem_sidecar.observability.engine_counters import (
    DataPathCounts,
    EngineCounters,
    EngineReadings,
    parse_readings,
)
from tandem_sidecar.observability.metrics import (
    FAILED_LOADS,
    REPORTS_TIMES,
    TRANSFER_BUCKETS,
    Metrics,
)

VLLM_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
ERRORS = ("disaggregated_errors_total", {"phase": "kv_transfer"})
ENGINE = HostPort("127.0.0.1", 8200)
COUNT = "disaggregated_kv_transfer_duration_seconds_count"
BUCKET = "disaggregated_kv_transfer_duration_seconds_bucket"


class Page:
    """The metrics page of an engine with two ranks, as vLLM writes it, with unrelated lines."""

    def __init__(self) -> None:
        self.started: float | None = time.time() + 3600
        self.failed = 0
        self.took: list[float] = []
        self.scrapes = 0
        self.unreachable = False

    async def ask(self) -> dict[HostPort, bytes | None]:
        self.scrapes += 1
        return {ENGINE: None if self.unreachable else self.text()}

    def text(self) -> bytes:
        lines = [
            "# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration.",
            "# TYPE vllm:nixl_xfer_time_seconds histogram",
            *self._rank("0", self.took),
            *self._rank("1", []),
            f"{names.ENGINE_XFER_FAILED}{{{_labels('0')}}} {float(self.failed)}",
            f"{names.ENGINE_XFER_FAILED}{{{_labels('1')}}} 0.0",
            'vllm:nixl_num_failed_transfers_created{engine="0"} 1.7e+09',
            'vllm:nixl_num_failed_notifications_total{engine="0"} 99.0',
        ]
        if self.started is not None:
            lines.append(f"{names.PROCESS_START_TIME} {self.started}")
        return ("\n".join(lines) + "\n").encode()

    def restart(self) -> None:
        self.started = (self.started or 0) + 1
        self.failed, self.took = 0, []

    def _rank(self, rank: str, took: list[float]) -> list[str]:
        name = names.ENGINE_XFER_SECONDS
        labels = _labels(rank)
        buckets = [
            f'{name}_bucket{{{labels},le="{bound}"}} {float(sum(t <= bound for t in took))}'
            for bound in (*VLLM_BOUNDS, float("inf"))
        ]
        return [
            *(bucket.replace('le="inf"', 'le="+Inf"') for bucket in buckets),
            f"{name}_count{{{labels}}} {len(took)}",
            f"{name}_sum{{{labels}}} {sum(took)}",
        ]


def _labels(rank: str) -> str:
    return f'engine="{rank}",model_name="a }} b"'


class Setup:
    def __init__(self) -> None:
        self.page = Page()
        self.metrics = Metrics()
        self.failed_loads = 0
        self.reports_times: bool | None = False
        self.counters = EngineCounters(self.page.ask, self.metrics, self.data_path, fresh=0.0)

    def data_path(self) -> DataPathCounts:
        return DataPathCounts(self.failed_loads, self.reports_times)

    def count_failed_load(self) -> None:
        """Count as the observer does when a request with a failed KV load ends."""
        self.failed_loads += 1
        self.metrics.errors[ErrorPhase.KV_TRANSFER].inc()

    async def value(self, name: str, labels: dict[str, str] | None = None) -> float:
        await self.counters.refresh()
        return self.metrics.registry.get_sample_value(name, labels or {}) or 0.0

    async def errors(self) -> float:
        return await self.value(*ERRORS)


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_the_engines_transfers_are_added_bucket_by_bucket(setup: Setup) -> None:
    setup.page.took = [0.004, 0.06, 0.06, 0.4, 7.0]
    assert await setup.value(COUNT) == 5
    for bound, below in (("0.0025", 0), ("0.005", 1), ("0.075", 3), ("0.5", 4), ("10.0", 4)):
        assert await setup.value(BUCKET, {"le": bound}) == below
    assert await setup.value(COUNT.replace("_count", "_sum")) == pytest.approx(7.524)
    setup.page.took.append(0.06)
    assert await setup.value(BUCKET, {"le": "0.075"}) == 4
    assert await setup.value(COUNT) == 6


async def test_transfers_reported_with_answers_are_not_counted_again(setup: Setup) -> None:
    setup.reports_times = True
    setup.page.took = [0.1]
    assert await setup.value(COUNT) == 0


async def test_transfers_wait_until_an_answer_shows_whether_times_are_reported(
    setup: Setup,
) -> None:
    setup.reports_times = None
    setup.page.took = [0.1]
    assert await setup.value(COUNT) == 0
    setup.page.took = [0.1, 0.2]
    assert await setup.value(COUNT) == 0
    setup.reports_times = False
    assert await setup.value(COUNT) == 2


async def test_a_failed_load_without_an_error_answer_counts(setup: Setup) -> None:
    setup.page.failed = 3
    assert await setup.errors() == 3
    assert await setup.errors() == 3


@pytest.mark.parametrize("engine_first", [True, False])
async def test_a_failed_load_counted_by_both_counts_once(setup: Setup, engine_first: bool) -> None:
    await setup.errors()
    for _ in range(3):
        if engine_first:
            setup.page.failed += 1
            await setup.errors()
            setup.count_failed_load()
        else:
            setup.count_failed_load()
            await setup.errors()
            setup.page.failed += 1
    assert await setup.errors() == 3
    setup.page.failed += 1
    assert await setup.errors() == 4


async def test_a_failure_counted_by_the_sidecar_alone_hides_no_later_one(setup: Setup) -> None:
    setup.count_failed_load()
    assert await setup.errors() == 1
    assert await setup.errors() == 1
    setup.page.failed = 1
    assert await setup.errors() == 2


async def test_a_restart_of_the_engine_lowers_no_counter(setup: Setup) -> None:
    setup.page.failed, setup.page.took = 2, [0.1, 0.1]
    assert await setup.errors() == 2
    setup.page.restart()
    assert await setup.errors() == 2
    setup.page.restart()
    setup.page.failed, setup.page.took = 5, [0.2, 0.2, 0.2]
    assert await setup.errors() == 7
    assert await setup.value(COUNT) == 5


async def test_without_a_start_time_a_falling_counter_means_a_restart(setup: Setup) -> None:
    setup.page.started = None
    await setup.errors()
    setup.page.failed = 3
    assert await setup.errors() == 3
    setup.page.failed = 1
    assert await setup.errors() == 4


async def test_counts_of_an_engine_older_than_the_sidecar_are_the_baseline(setup: Setup) -> None:
    setup.page.started = time.time() - 3600
    setup.page.failed, setup.page.took = 9, [0.1]
    assert await setup.errors() == 0
    setup.page.failed = 10
    assert await setup.errors() == 1
    assert await setup.value(COUNT) == 0


async def test_an_unreachable_engine_changes_nothing(setup: Setup) -> None:
    setup.page.failed = 1
    assert await setup.errors() == 1
    setup.page.unreachable, setup.page.failed = True, 4
    assert await setup.errors() == 1
    setup.page.unreachable = False
    assert await setup.errors() == 4


async def test_concurrent_scrapes_fetch_one_page() -> None:
    page = Page()
    counters = EngineCounters(page.ask, Metrics(), lambda: DataPathCounts(0, None))
    await asyncio.gather(*(counters.refresh() for _ in range(3)))
    assert page.scrapes == 1


def test_the_reference_engines_page_is_parsed() -> None:
    engine = EngineMetrics("m")
    engine.record_pull(PullResult(tokens=16, bytes=4096, seconds=0.06))
    engine.record_pull_failure()
    readings = parse_readings(generate_latest(engine.registry))
    assert (readings.failed, readings.seconds) == (1, 0.06)
    assert (readings.buckets[0.05], readings.buckets[0.075], readings.buckets[float("inf")]) == (
        0,
        1,
        1,
    )
    assert readings.started is not None


def test_hand_offs_through_storage_are_read_from_vllms_page() -> None:
    page = (
        b'tandem_vllm_storage_transfer_seconds_bucket{engine="0",le="0.1"} 2.0\n'
        b'tandem_vllm_storage_transfer_seconds_bucket{engine="0",le="+Inf"} 3.0\n'
        b'tandem_vllm_storage_transfer_seconds_sum{engine="0"} 0.75\n'
        b'tandem_vllm_storage_failed_transfers_total{engine="0"} 4.0\n'
        b'tandem_vllm_storage_load_seconds_sum{engine="0"} 99.0\n'
    )
    assert parse_readings(page) == EngineReadings(None, 4.0, 0.75, {0.1: 2.0, inf: 3.0})
    # No value moves to another bucket when the sidecar adds them to its own.
    assert set(vllm_storage.TRANSFER_BUCKETS) <= set(TRANSFER_BUCKETS)


def test_counts_of_several_workers_are_combined() -> None:
    assert DataPathCounts.of_samples([]) == DataPathCounts(0, None)
    samples = [(FAILED_LOADS, 2.0), (REPORTS_TIMES, 1.0), (FAILED_LOADS, 3.0), ("other", 9.0)]
    assert DataPathCounts.of_samples(samples) == DataPathCounts(5, True)
    assert DataPathCounts.of_samples([(REPORTS_TIMES, 0.0)]) == DataPathCounts(0, False)


def test_counts_of_a_process_can_be_read_from_its_metrics() -> None:
    metrics = Metrics()
    assert (
        DataPathCounts.of_process(metrics)
        == DataPathCounts.of_samples(_samples(metrics))
        == DataPathCounts(0, None)
    )
    metrics.failed_loads.inc(2)
    metrics.engine_reports_times = False
    assert (
        DataPathCounts.of_process(metrics)
        == DataPathCounts.of_samples(_samples(metrics))
        == DataPathCounts(2, False)
    )


def _samples(metrics: Metrics) -> list[tuple[str, float]]:
    return [(s.name, s.value) for family in metrics.registry.collect() for s in family.samples]


def test_a_page_in_another_format_has_no_readings() -> None:
    assert parse_readings(b"<html>") == EngineReadings()
    assert parse_readings(b"vllm:nixl_num_failed_transfers_total NaN\n") == EngineReadings()
    bounds = b"".join(
        b'vllm:nixl_xfer_time_seconds_bucket{le="%s"} 1\n' % bound
        for bound in (b"x", b"NaN", b"1e", b"1e-05", b"0.5", b"+Inf")
    )
    assert set(parse_readings(bounds).buckets) == {1e-05, 0.5, inf}


async def test_several_engines_are_counted_each_from_its_own_past() -> None:
    metrics, pages = Metrics(), {ENGINE: Page(), HostPort("127.0.0.1", 8201): Page()}
    first, second = pages.values()
    second.started, second.took = 1.0, [0.2]

    async def ask() -> dict[HostPort, bytes | None]:
        return {at: None if page.unreachable else page.text() for at, page in pages.items()}

    counters = EngineCounters(ask, metrics, lambda: DataPathCounts(0, False), fresh=0.0)

    async def count() -> float | None:
        await counters.refresh()
        return metrics.registry.get_sample_value(COUNT)

    first.took = [0.1]
    assert await count() == 1, "the second engine is older: its transfers were another router's"
    second.took.append(0.3)
    first.unreachable = True
    assert await count() == 2
    first.unreachable = False
    first.took.append(0.4)
    second.restart()
    second.took = [0.5]
    assert await count() == 4
    left = pages.pop(ENGINE)
    assert await count() == 4
    left.started, left.took = 1.0, [0.1] * 9
    pages[ENGINE] = left
    assert await count() == 4, "an engine that is listed again begins anew"


async def test_a_failure_of_a_silent_engine_is_not_counted_twice(setup: Setup) -> None:
    assert await setup.errors() == 0
    setup.page.unreachable = True
    setup.count_failed_load()
    assert await setup.errors() == 1
    setup.page.unreachable, setup.page.failed = False, 1
    assert await setup.errors() == 1
