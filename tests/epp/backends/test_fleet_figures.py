"""The table of figures has what every pod's estimates say, although it is written only in part."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.config import Backend
from tandem_contract.timing import Timing
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.estimates.request_load import PlacedPrompt, RequestLoad
from tandem_planner.cost import FAILURE_SECONDS, PodFigures

PAGE = ScrapeResult(Gauges(running=3.0, kv_usage=0.5), b"1", 16, 1000)


def discovered(name: str) -> DiscoveredBackend:
    return DiscoveredBackend(Backend(name=name, url="http://10.0.0.1:8000"))


def fleet_of(names: str) -> Fleet:
    fleet = Fleet()
    fleet.apply(map(discovered, names))
    return fleet


def expected(pod: Pod, now: float) -> PodFigures:
    """The figures of `pod`, computed from nothing."""
    pod.estimates.learned()
    figures = pod.estimates.figures(now)
    return figures._replace(standing=FAILURE_SECONDS * pod.health.failure_rate)


@given(seed=st.integers(0, 10_000))
def test_the_table_follows_whatever_happens(seed: int) -> None:
    random, now = Random(seed), 1000.0
    fleet = fleet_of("abcd")
    pods, loads = list(fleet), list[RequestLoad]()
    for each in pods:
        each.estimates.is_unified = random.random() < 0.5
    for _ in range(30):
        now += random.choice([0.0, 0.05, 2.0])
        pod, other = random.sample(pods, 2)
        size = PlacedPrompt(random.randrange(1, 5000), 0, 0, 50.0, random.random() < 0.5)
        match random.randrange(7):
            case 0 | 1:
                prefill = random.choice([None, other.estimates])
                loads.append(RequestLoad(pod.estimates, prefill, size, now))
            case 2 if loads:
                timing = Timing(compute=0.3, transfer=0.01, bytes=1_000_000)
                random.choice(loads).on_response(now, timing)
            case 3 if loads:
                loads.pop(random.randrange(len(loads))).end(now)
            case 4:
                pod.apply_scrape(PAGE, now)
                fleet.figures.share()
            case 5:
                fleet.ejections.record(pod, Outcome.ERROR, now, now)
            case 6:
                fleet.ejections.advance(now)
            case _:
                pass
        if random.random() < 0.5:
            table = fleet.figures.at(now)
            assert table.pods == [expected(p, now) for p in fleet]


def test_a_pod_that_comes_or_goes_renumbers_the_rows() -> None:
    fleet = fleet_of("ab")
    a = fleet.find("a")
    assert a is not None
    RequestLoad(a.estimates, None, PlacedPrompt(1000), 5.0)
    queued = fleet.figures.at(5.0).pods[fleet.figures.rows[a]]
    fleet.apply(map(discovered, "ca"))
    assert fleet.figures.names == ("c", "a")
    assert fleet.figures.at(5.0).pods[fleet.figures.rows[a]] == queued
    assert queued.late_share
    assert not fleet.figures.at(5.0).pods[0].late_share


def test_a_prefill_whose_end_is_not_seen_ends_by_the_clock() -> None:
    fleet = fleet_of("a")
    [pod] = fleet
    RequestLoad(pod.estimates, None, PlacedPrompt(1000, is_stream=False), 5.0)
    assert fleet.figures.at(5.0).pods[0].late_share
    assert not fleet.figures.at(50.0).pods[0].late_share


def test_pods_without_samples_share_those_of_the_others() -> None:
    fleet = fleet_of("ab")
    a, b = fleet
    load = RequestLoad(a.estimates, None, PlacedPrompt(1000), 5.0)
    load.on_response(7.0, Timing(compute=2.0))
    fleet.figures.share()
    assert b.estimates.prefill.cost == a.estimates.prefill.cost
    assert fleet.figures.at(7.0).pods[1].per_token == pytest.approx(a.estimates.prefill.cost[1])
