"""Backends: health, restarts, views."""

from dataclasses import replace

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_contract.timing import Timing
from tandem_epp.pods import REFUSALS, Fleet, Gauges, Pod, Report, may_prefill

REPORT = Report(Gauges(), b"one", block_tokens=16, blocks=100)


def pod(name: str = "a", **fields: object) -> Pod:
    return Pod(Backend(name=name, url="http://127.0.0.1:1", **fields))  # type: ignore[arg-type]


def test_a_backend_that_never_answered_is_unhealthy_at_its_first_refusal() -> None:
    fresh = pod()
    assert fresh.ready
    assert fresh.unreachable()
    assert not fresh.ready
    assert not fresh.unreachable(), "nothing changed"


def test_one_that_did_answer_may_miss_a_few_scrapes() -> None:
    known = pod()
    known.reported(REPORT)
    changes = [known.unreachable() for _ in range(REFUSALS)]
    assert changes == [*[False] * (REFUSALS - 1), True]
    assert known.reported(REPORT), "healthy again is a change"
    assert known.ready


def test_a_restart_or_another_block_size_empties_the_index() -> None:
    known = pod()
    known.reported(REPORT)
    for changed in (replace(REPORT, incarnation=b"two"), replace(REPORT, block_tokens=32)):
        known.index.add([1, 2, 3])
        known.reported(REPORT)
        known.index.add([1, 2, 3])
        assert 1 in known.index
        known.reported(changed)
        assert 1 not in known.index


def test_only_what_scorers_see_counts_as_a_change() -> None:
    known = pod()
    assert known.reported(REPORT)
    assert not known.reported(REPORT)
    assert known.reported(replace(REPORT, gauges=Gauges(waiting=1.0)))


def test_prefill_rates_are_learned_smoothly() -> None:
    known = pod()
    known.learn(Timing(cached=5))
    assert known.prefill_rate is None
    known.learn(Timing(compute=2.0, computed=200))
    assert known.prefill_rate == 100
    known.learn(Timing(compute=1.0, computed=200))
    assert known.prefill_rate == 110


def test_a_view_is_one_object_until_something_changes() -> None:
    fleet = Fleet()
    fleet.apply([pod("a").backend, pod("b", models=("m",)).backend])
    first = fleet.ready("m")
    assert fleet.ready("m") is first
    fleet.changed()
    assert fleet.ready("m") is not first


def test_views_follow_models() -> None:
    fleet = Fleet()
    fleet.apply([pod("any").backend, pod("m", models=("m",)).backend])
    assert [p.name for p in fleet.ready("m")] == ["any", "m"]
    assert [p.name for p in fleet.ready("x")] == ["any"]
    assert fleet.ready("x") is fleet.ready("y"), "unlisted names share a view"
    assert fleet.serves("x")
    fleet.apply([pod("m", models=("m",)).backend])
    assert not fleet.serves("x")
    assert [p.name for p in fleet.ready(None)] == ["m"]


def test_a_reload_keeps_what_is_known_unless_the_url_moved() -> None:
    fleet = Fleet()
    fleet.apply([pod("a").backend, pod("b").backend])
    a, b = fleet
    fleet.apply([Backend(name="a", url=a.backend.url, weight=3), Backend("b", "http://10.0.0.9:1")])
    kept, fresh = fleet
    assert kept is a
    assert kept.backend.weight == 3
    assert fresh is not b


def test_a_host_name_is_not_chosen_before_it_is_resolved() -> None:
    named = Pod(Backend(name="a", url="http://engine:8000"))
    assert not named.ready
    named.address = "10.0.0.1:8000"
    assert named.ready


def test_who_may_prefill_for_whom() -> None:
    d, p = pod("d", role=Role.DECODE), pod("p", role=Role.PREFILL)
    u, v = pod("u"), pod("v")
    assert may_prefill(p, d)
    assert may_prefill(u, d)
    assert may_prefill(p, u)
    assert not may_prefill(d, u)
    assert not may_prefill(u, u), "never for itself"
    assert not may_prefill(v, u), "two unified backends are no disaggregation"


def test_an_address_of_version_6_is_written_in_brackets() -> None:
    assert Pod(Backend(name="a", url="http://[::1]:8000")).address == "[::1]:8000"
