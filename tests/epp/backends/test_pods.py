"""Backends: health, restarts, views."""

from dataclasses import replace

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_contract.timing import Timing
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import REFUSALS, Gauges, Member, Pod, Report, may_prefill

REPORT = Report(Gauges(), b"one", block_tokens=16, blocks=100)


def pod(name: str = "a", **fields: object) -> Pod:
    return Pod(Backend(name=name, url="http://127.0.0.1:1", **fields))  # type: ignore[arg-type]


def members(*pods: Pod) -> list[Member]:
    return [Member(each.backend) for each in pods]


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
    fleet.apply(members(pod("a"), pod("b", models=("m",))))
    first = fleet.ready("m")
    assert fleet.ready("m") is first
    fleet.changed()
    assert fleet.ready("m") is not first


def test_views_follow_models() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("any"), pod("m", models=("m",))))
    assert [p.name for p in fleet.ready("m")] == ["any", "m"]
    assert [p.name for p in fleet.ready("x")] == ["any"]
    assert fleet.ready("x") is fleet.ready("y"), "unlisted names share a view"
    assert fleet.serves("x")
    fleet.apply(members(pod("m", models=("m",))))
    assert not fleet.serves("x")
    assert [p.name for p in fleet.ready(None)] == ["m"]


def test_a_change_keeps_what_is_known_unless_the_url_or_the_pod_moved() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b"), pod("c")))
    a, b, c = fleet
    same = Backend(name="a", url=a.backend.url, weight=3)
    moved = Backend(name="b", url="http://10.0.0.9:1")
    fleet.apply([Member(same), Member(moved), Member(c.backend, uid="another")])
    kept, there, again = fleet
    assert kept is a
    assert kept.backend.weight == 3
    assert there is not b
    assert again is not c


def test_a_backend_that_does_not_serve_is_known_and_not_chosen() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b")))
    a, b = fleet
    fleet.apply([Member(a.backend, serving=False), Member(b.backend)])
    assert fleet.ready(None) == (b,)
    fleet.apply([Member(a.backend), Member(b.backend)])
    assert fleet.ready(None) == (a, b), "what is known of it is kept"


def test_partners_share_a_hash_and_a_model() -> None:
    fleet = Fleet()
    fleet.apply(
        members(
            pod("d", role=Role.DECODE, compat="1", models=("m",)),
            pod("p", role=Role.PREFILL, compat="1", models=("m", "n")),
            pod("old", role=Role.PREFILL, compat="0", models=("m",)),
            pod("none", role=Role.PREFILL, models=("m",)),
            pod("other", role=Role.PREFILL, compat="1", models=("o",)),
        )
    )
    d = next(iter(fleet))
    assert [p.name for p in fleet.partners(None, d)] == ["d", "p"]
    assert fleet.partners(None, d) is fleet.partners(None, d)
    assert fleet.partners("o", d) == ()
    assert fleet.paired(None) == (d,)
    alone = Fleet()
    alone.apply(members(pod("d", role=Role.DECODE), pod("p", role=Role.PREFILL)))
    assert alone.partners("m", next(iter(alone))) is alone.ready("m"), "nothing to leave out"


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
