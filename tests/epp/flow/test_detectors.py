"""llm-d's detectors and usage limits: when pods are saturated by thresholds, of each priority."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.flow.ceilings import Ceilings, HoldbackCeilings, SoftCeilings, StaticCeilings
from tandem_epp.flow.detectors import (
    ConcurrencyDetector,
    DetectedSaturation,
    Detector,
    UtilizationDetector,
)
from tandem_epp.flow.saturation import Saturation

NOW = 1000.0
PRIORITIES = (10, 0, -5)


class Pods:
    """A fleet of engines with gauges of their own."""

    def __init__(self, roles: Mapping[str, str]) -> None:
        self.fleet = Fleet()
        backends = [
            Backend(name=name, url=f"http://10.0.0.{i}:8000", role=Role(role))
            for i, (name, role) in enumerate(roles.items(), 1)
        ]
        self.fleet.apply([DiscoveredBackend(backend) for backend in backends], 16, 1000, NOW)

    def __getitem__(self, name: str) -> Pod:
        return next(pod for pod in self.fleet if pod.name == name)

    def scrape(self, name: str, now: float = NOW, *, waiting: float = 0, kv: float = 0) -> None:
        gauges = Gauges(running=1, waiting=waiting, kv_usage=kv)
        self[name].apply_scrape(ScrapeResult(gauges, b"1", 16, 1000), now)

    def detected(self, detector: Detector, ceilings: Ceilings | None = None) -> DetectedSaturation:
        return DetectedSaturation(self.fleet, Saturation(self.fleet), detector, ceilings)


def saturation(pods: Pods, detector: Detector, now: float = NOW) -> float:
    return pods.detected(detector).saturation("m", now)


def test_the_longer_of_queue_and_cache_counts_and_pods_are_averaged() -> None:
    pods, detector = Pods({"a": "unified", "b": "unified"}), UtilizationDetector()
    pods.scrape("a", waiting=5, kv=0.4)
    pods.scrape("b", kv=0.4)
    assert saturation(pods, detector) == pytest.approx((1.0 + 0.5) / 2)


def test_what_was_placed_since_the_scrape_counts_at_once() -> None:
    pods, detector = Pods({"a": "unified"}), UtilizationDetector(queue_depth=4)
    pods.scrape("a")
    pods["a"].in_flight += 3
    assert saturation(pods, detector) == 0.75
    pods["a"].estimates.count_placed(0.1, 0.6 * 16_000)
    assert saturation(pods, detector) == 0.75
    pods["a"].estimates.count_placed(0.1, 0.12 * 16_000)
    assert saturation(pods, detector) == pytest.approx(0.72 / 0.8)
    # The next scrape shows whether it waits.
    pods.scrape("a")
    assert saturation(pods, detector) == 0.0


def test_the_more_saturated_phase_counts() -> None:
    pods, detector = Pods({"p": "prefill", "d": "decode"}), UtilizationDetector()
    pods.scrape("p", waiting=4)
    pods.scrape("d", waiting=1)
    assert saturation(pods, detector) == 0.8


def test_a_busy_pod_without_fresh_figures_is_full_and_gets_one_request_a_second() -> None:
    pods, detector = Pods({"a": "unified"}), UtilizationDetector()
    pods.scrape("a")
    later = NOW + 10
    assert saturation(pods, detector, later) == 0.0  # at rest
    pods["a"].in_flight = 1
    assert saturation(pods, detector, later) == 1.0
    detected = pods.detected(detector)

    def may_go(now: float) -> bool:
        return bool(detected.pods_with_room("m", 0, PRIORITIES, now))

    assert [may_go(later + tenth / 10) for tenth in range(21)].count(True) == 3


@pytest.mark.parametrize(
    ("mode", "expected"), [("requests", 0.3), ("tokens", 0.5), ("hybrid", 0.5)]
)
def test_requests_or_tokens_in_flight_count(mode: str, expected: float) -> None:
    pods = Pods({"a": "unified"})
    pods["a"].in_flight, pods["a"].tokens_in_flight = 3, 500
    assert saturation(pods, ConcurrencyDetector(10, 1000, mode)) == expected  # type: ignore[arg-type]


def test_headroom_is_for_the_filter_alone() -> None:
    pods, detector = Pods({"a": "unified"}), ConcurrencyDetector(10, headroom=0.2)
    pods["a"].in_flight = 11
    assert saturation(pods, detector) == 1.1
    figures = pods["a"].estimates.figures(NOW)
    assert detector.admits(pods["a"], figures, NOW)
    pods["a"].in_flight = 12
    assert not detector.admits(pods["a"], figures, NOW)


def test_a_priority_waits_from_its_ceiling_on() -> None:
    pods, detector = Pods({"a": "unified"}), ConcurrencyDetector(10)
    detected = pods.detected(detector, HoldbackCeilings(0.4))

    def going(requests: int) -> list[int]:
        pods["a"].in_flight = requests
        return [
            priority
            for priority in PRIORITIES
            if detected.pods_with_room("m", priority, PRIORITIES, NOW)
        ]

    assert going(3) == [10, 0, -5]
    assert going(5) == [10, 0]
    assert going(9) == [10]
    assert going(10) == []
    assert not detected.has_room("m", PRIORITIES, NOW)


def test_ceilings_are_spread_by_rank_or_value() -> None:
    assert HoldbackCeilings(0.4).limits(0.0, PRIORITIES, NOW) == pytest.approx([1.0, 0.7, 0.4])
    by_value = HoldbackCeilings(0.4, is_by_value=True).limits(0.0, PRIORITIES, NOW)
    assert by_value == pytest.approx([1.0, 0.6, 0.4])
    assert HoldbackCeilings(0.4, 0.9).limits(0.0, (0,), NOW) == [0.9]
    assert StaticCeilings(0.8).limits(0.0, (1, 0), NOW) == [0.8, 0.8]


@given(st.floats(0, 2), st.lists(st.integers(-9, 9), unique=True, min_size=1), st.floats(0, 1e6))
def test_soft_ceilings_never_favor_a_lower_priority(
    saturation: float, priorities: Sequence[int], now: float
) -> None:
    ceilings = SoftCeilings().limits(saturation, sorted(priorities, reverse=True), now)
    assert ceilings[0] == 1.0
    assert list(ceilings) == sorted(ceilings, reverse=True)


def test_soft_ceilings_are_open_for_a_share_of_the_time() -> None:
    turns = [SoftCeilings().limits(0.8, (1, 0), turn * 0.01 + 0.001)[1] for turn in range(400)]
    assert turns.count(1.0) == 100
