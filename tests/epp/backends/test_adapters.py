"""LoRA adapters: what is resident, what can be loaded, and which pods may be chosen."""

import pytest

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends import fleet as fleet_module
from tandem_epp.backends.adapters import LOAD_SECONDS, WAIT_SECONDS, AdapterSlots, PodAdapters
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.estimates.engine_figures import Gauges


def slots(running: str = "", waiting: str = "", count: int = 2) -> AdapterSlots:
    return AdapterSlots(frozenset(running), frozenset(waiting), count)


def test_an_adapter_stays_resident_after_its_requests_until_others_take_its_slot() -> None:
    adapters = PodAdapters()
    adapters.apply(slots("a"))
    adapters.apply(slots())
    assert adapters.load_seconds("a") == 0
    assert adapters.load_seconds("b") == LOAD_SECONDS
    adapters.use("b")
    assert adapters.load_seconds("a") == adapters.load_seconds("b") == 0
    adapters.apply(slots("c"))
    assert adapters.load_seconds("a") == LOAD_SECONDS, "it was not used for longest"
    assert adapters.load_seconds("b") == 0
    adapters.clear()
    assert adapters.load_seconds("b") == LOAD_SECONDS


def test_what_another_replica_knows_is_older_than_what_was_used_here() -> None:
    adapters = PodAdapters()
    adapters.take_over("ab")
    assert adapters.resident == ("a", "b"), "the slots are not known yet"
    adapters.apply(slots("c"))
    assert adapters.resident == ("b", "c")
    adapters.take_over("dc")
    assert adapters.resident == ("b", "c")


def test_an_adapter_waits_while_every_slot_has_a_running_one() -> None:
    adapters = PodAdapters()
    assert adapters.can_load("x"), "nothing is known yet"
    adapters.apply(slots("ab"))
    assert adapters.can_load("a")
    assert not adapters.can_load("x")
    assert adapters.load_seconds("x") == WAIT_SECONDS + LOAD_SECONDS
    adapters.apply(slots("a"))
    assert adapters.can_load("x")


@pytest.mark.parametrize(
    ("reported", "score"),
    [(slots("x"), 1.0), (slots("a"), 0.8), (slots("a", "x"), 0.6), (slots("ab"), 0.0), (None, 0.8)],
)
def test_affinity_is_that_of_llm_d(reported: AdapterSlots | None, score: float) -> None:
    adapters = PodAdapters()
    adapters.apply(reported)
    assert adapters.affinity("x") == score


def fleet(**reported: AdapterSlots) -> tuple[Fleet, list[Pod]]:
    pods = Fleet()
    pods.apply(
        DiscoveredBackend(
            Backend(name, f"http://10.0.0.1/{name}", Role.PREFILL if name == "p" else Role.DECODE)
        )
        for name in reported
    )
    for pod in pods:
        pod.apply_scrape(ScrapeResult(Gauges(), b"1", adapters=reported[pod.name]))
        pods.learn_adapters(pod.adapters.reported)
    pods.invalidate_views()
    return pods, list(pods)


def test_a_pod_that_cannot_load_the_adapter_is_not_chosen() -> None:
    pods, (full, free, prefill) = fleet(d1=slots("ab"), d2=slots("a"), p=slots("ab"))
    assert pods.ready_pods("b") == (full, free, prefill)
    pods.learn_adapters(slots("x"))
    assert pods.ready_pods("x") == (free, prefill), "no other prefill pod could load it"
    assert pods.ready_pods("base") == (full, free, prefill), "not an adapter"
    assert pods.ready_pods("other") is pods.ready_pods("base")


@pytest.mark.interpreted
def test_adapters_that_no_engine_reports_any_more_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "MAX_ADAPTERS", 3)
    pods, _ = fleet(d1=slots("ab"))
    pods.learn_adapters(slots("c"))
    pods.learn_adapters(slots("a"))
    pods.learn_adapters(slots("d"))
    assert [name for name in "abcd" if pods.is_adapter(name)] == ["a", "c", "d"]


def test_with_every_slot_taken_the_request_waits_on_any_pod() -> None:
    pods, both = fleet(d1=slots("ab"), d2=slots("cd"))
    pods.learn_adapters(slots("x"))
    assert list(pods.ready_pods("x")) == both
