"""Backends: health, restarts, views."""

from dataclasses import replace

from tandem_contract.config import Backend, HealthChecks
from tandem_contract.paths import Role
from tandem_contract.prefix import text_chain
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pace import HALF_LIFE
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges
from tandem_planner.prefill_fit import prefill_sample

REPORT = ScrapeResult(Gauges(), b"one", block_tokens=16, blocks=100)


def pod(name: str = "a", **fields: object) -> Pod:
    return Pod(Backend(name=name, url="http://127.0.0.1:1", **fields))  # type: ignore[arg-type]


def members(*pods: Pod) -> list[DiscoveredBackend]:
    return [DiscoveredBackend(each.backend) for each in pods]


def test_a_backend_that_never_answered_is_unhealthy_after_one_failed_scrape() -> None:
    fresh = pod()
    assert fresh.ready
    assert fresh.record_failed_check()
    assert not fresh.ready
    assert not fresh.record_failed_check(), "it was unhealthy before"


def test_a_backend_that_answered_may_fail_a_few_checks() -> None:
    scraped_pod = pod()
    scraped_pod.apply_scrape(REPORT)
    changes = [scraped_pod.record_failed_check() for _ in range(3)]
    assert changes == [False, False, True]
    assert scraped_pod.apply_scrape(REPORT), "becoming healthy is a change"
    assert scraped_pod.ready


def test_thresholds_say_how_many_checks_in_a_row_count() -> None:
    checks = HealthChecks(unhealthy_threshold=2, healthy_threshold=3)
    scraped_pod = pod()
    scraped_pod.apply_scrape(REPORT, checks=checks)
    assert not scraped_pod.record_failed_check(checks)
    scraped_pod.apply_scrape(REPORT, checks=checks)
    assert not scraped_pod.record_failed_check(checks), "a passed check between them"
    assert scraped_pod.record_failed_check(checks)
    ready = []
    for passes in (True, True, False, True, True, True):
        if passes:
            scraped_pod.apply_scrape(REPORT, checks=checks)
        else:
            scraped_pod.record_failed_check(checks)
        ready.append(scraped_pod.ready)
    assert ready == [False, False, False, False, False, True]


def test_a_restart_clears_the_index_and_another_capacity_shrinks_it() -> None:
    chain = text_chain(bytes(16 * 64))
    scraped_pod = pod()
    scraped_pod.apply_scrape(REPORT)
    prefixes = scraped_pod.prefixes
    prefixes.confirm(prefixes.place(scraped_pod, chain))
    scraped_pod.apply_scrape(replace(REPORT, block_tokens=32, blocks=4))
    assert prefixes._cached.tokens(scraped_pod) == 4 * 32
    scraped_pod.apply_scrape(replace(REPORT, incarnation=b"two"))
    assert prefixes.match(chain).placed_tokens(scraped_pod) == 0


def test_the_first_answer_is_no_restart() -> None:
    """What another replica told before it stays."""
    chain = text_chain(bytes(16 * 64))
    fresh = pod()
    fresh.prefixes.confirm(fresh.prefixes.place(fresh, chain))
    fresh.health.eject(now=1.0)
    fresh.estimates.prefill.add(prefill_sample([(500.0, 0.0)], 0.1), now=1.0)
    fresh.apply_scrape(REPORT)
    held = fresh.prefixes.match(chain).placed_tokens(fresh)
    assert held == fresh.prefixes._cached.tokens(fresh) > 0
    assert fresh.health.is_ejected
    assert fresh.estimates.prefill.count == 1
    fresh.apply_scrape(replace(REPORT, incarnation=b"two"))
    assert not fresh.health.is_ejected
    assert fresh.estimates.prefill.count == 0


def test_a_pod_that_leaves_is_forgotten() -> None:
    fleet, chain = Fleet(), text_chain(bytes(640))
    for backends in ([pod("a")], [pod("a"), pod("b")], [pod("b")]):
        fleet.apply(members(*backends))
        for member in fleet:
            fleet.prefixes.confirm(fleet.prefixes.place(member, chain))
    assert [found.name for found in fleet.prefixes.match(chain).cached] == ["b"]
    fleet.apply([])
    assert fleet.prefixes.bytes == 0


def test_only_changes_that_scorers_see_are_reported() -> None:
    scraped_pod = pod()
    assert scraped_pod.apply_scrape(REPORT)
    assert not scraped_pod.apply_scrape(REPORT)
    assert scraped_pod.apply_scrape(replace(REPORT, gauges=Gauges(waiting=1.0)))


def test_a_view_is_one_object_until_something_changes() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b", models=("m",))))
    first = fleet.ready_pods("m")
    assert fleet.ready_pods("m") is first
    fleet.invalidate_views()
    assert fleet.ready_pods("m") is not first


def test_new_scores_renew_a_view_and_keep_its_pods() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b")))
    first = fleet.ready_pods(None)
    for each in fleet:
        # Not reported to the fleet: readiness is looked at only when the views are dropped.
        each.healthy = False
    fleet.invalidate_scores()
    renewed = fleet.ready_pods(None)
    assert renewed == first
    assert renewed is not first
    fleet.invalidate_views()
    assert fleet.ready_pods(None) == ()


def test_whether_a_pod_has_prefill_partners_follows_readiness_and_membership() -> None:
    fleet = Fleet()
    d, p = pod("d", role=Role.DECODE), pod("p", role=Role.PREFILL)
    fleet.apply(members(d, p))
    decode, prefill = fleet
    assert fleet.is_disaggregated(decode)
    assert fleet.has_prefill_candidate(None, decode)
    prefill.healthy = False
    fleet.invalidate_views()
    assert fleet.is_disaggregated(decode), "a prefill pod that is not ready still counts"
    assert not fleet.has_prefill_candidate(None, decode)
    fleet.apply(members(d))
    assert not fleet.is_disaggregated(decode)


def test_views_are_per_model() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("any"), pod("m", models=("m",))))
    assert [p.name for p in fleet.ready_pods("m")] == ["any", "m"]
    assert [p.name for p in fleet.ready_pods("x")] == ["any"]
    assert fleet.ready_pods("x") is fleet.ready_pods("y"), "unlisted names share a view"
    assert fleet.can_serve("x")
    fleet.apply(members(pod("m", models=("m",))))
    assert not fleet.can_serve("x")
    assert [p.name for p in fleet.ready_pods(None)] == ["m"]


def test_a_pod_keeps_its_state_unless_its_url_or_uid_changes() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b"), pod("c")))
    a, b, c = fleet
    same = Backend(name="a", url=a.backend.url, weight=3)
    moved = Backend(name="b", url="http://10.0.0.9:1")
    another = DiscoveredBackend(c.backend, uid="another")
    fleet.apply([DiscoveredBackend(same), DiscoveredBackend(moved), another])
    a_after, b_after, c_after = fleet
    assert a_after is a
    assert a_after.backend.weight == 3
    assert b_after is not b
    assert c_after is not c


def test_a_backend_that_does_not_serve_is_kept_and_not_chosen() -> None:
    fleet = Fleet()
    fleet.apply(members(pod("a"), pod("b")))
    a, b = fleet
    fleet.apply([DiscoveredBackend(a.backend, serving=False), DiscoveredBackend(b.backend)])
    assert fleet.ready_pods(None) == (b,)
    fleet.apply([DiscoveredBackend(a.backend), DiscoveredBackend(b.backend)])
    assert fleet.ready_pods(None) == (a, b), "its state is kept"


def test_prefill_candidates_share_a_hash_and_a_model() -> None:
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
    assert [p.name for p in fleet.prefill_candidates(None, d)] == ["d", "p"]
    assert fleet.prefill_candidates(None, d) is fleet.prefill_candidates(None, d)
    assert fleet.prefill_candidates("o", d) == ()
    assert fleet.pods_with_prefill(None) == (d,)
    alone = Fleet()
    alone.apply(members(pod("d", role=Role.DECODE), pod("p", role=Role.PREFILL)))
    candidates = alone.prefill_candidates("m", next(iter(alone)))
    assert candidates is alone.ready_pods("m"), "no pod is left out"


def test_a_host_name_is_not_chosen_before_it_is_resolved() -> None:
    named = Pod(Backend(name="a", url="http://engine:8000"))
    assert not named.ready
    named.address = "10.0.0.1:8000"
    assert named.ready


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert Pod(Backend(name="a", url="http://[::1]:8000")).address == "[::1]:8000"


def test_gauges_fade_from_the_last_scrape_on() -> None:
    scraped_pod = pod()
    scraped_pod.fade(1.0)
    assert scraped_pod.gauges is None, "nothing was scraped that could fade"
    scraped_pod.in_flight = 1
    scraped_pod.apply_scrape(replace(REPORT, gauges=Gauges(running=9)), now=5.0)
    for _ in range(2):
        scraped_pod.fade(HALF_LIFE)
    assert scraped_pod.gauges == Gauges(running=5.0), "from the scrape, not from the faded gauges"
    assert scraped_pod.apply_scrape(replace(REPORT, gauges=Gauges(running=9)))
