"""Pairs of pods: which may serve one request together."""

from tandem_contract.config import Backend
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pairing import are_alike_unified, can_prefill_for, known_fabric
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_planner.fabrics import Place


def pod(name: str, role: Role = Role.UNIFIED) -> Pod:
    return Pod(Backend(name=name, url="http://127.0.0.1:1", role=role))


def test_which_roles_can_prefill_for_each_other() -> None:
    d, p = pod("d", Role.DECODE), pod("p", Role.PREFILL)
    u, v = pod("u"), pod("v")
    assert can_prefill_for(p, d)
    assert can_prefill_for(u, d)
    assert can_prefill_for(p, u)
    assert not can_prefill_for(d, u)
    assert not can_prefill_for(u, u), "not for itself"
    assert not can_prefill_for(v, u), "two unified backends are not disaggregated"
    assert are_alike_unified(v, u)
    assert not are_alike_unified(p, u)
    assert not are_alike_unified(u, d)


def fleet_at(*places: tuple[str | None, str | None]) -> Fleet:
    fleet = Fleet()
    fleet.apply(
        DiscoveredBackend(Backend(f"b{i}", f"http://10.0.0.{i}:1", node=node, domain=domain))
        for i, (node, domain) in enumerate(places)
    )
    return fleet


def test_the_class_of_a_pair_follows_from_node_and_domain() -> None:
    fleet = fleet_at(("n", "r"), ("n", "r"), ("m", "r"), ("o", "s"), (None, "s"), (None, None))
    first, *others = fleet
    assert [known_fabric(first, other) for other in others] == [
        FabricClass.SAME_NODE,
        FabricClass.SAME_DOMAIN,
        FabricClass.ELSEWHERE,
        FabricClass.ELSEWHERE,
        None,
    ]
    assert known_fabric(others[2], others[3]) is FabricClass.SAME_DOMAIN
    assert known_fabric(others[4], others[4]) is None, "nothing is known of it"


def test_pods_of_one_node_are_in_one_domain() -> None:
    fleet = fleet_at(("n", "r"), ("n", None), ("m", "s"), ("m", "q"), (None, None), ("", ""))
    assert [pod.place for pod in fleet] == [
        Place("n", "r"), Place("n", "r"), Place("m", "q"), Place("m", "q"), Place(), Place(),
    ]  # fmt: skip


def test_a_place_that_becomes_known_is_that_of_every_rank() -> None:
    fleet = fleet_at((None, None))
    [members] = fleet.backends
    fleet.set_ranks(members, 2)
    version = fleet.members_version
    fleet.apply([DiscoveredBackend(Backend("b0", "http://10.0.0.0:1", node="n"))])
    assert [pod.place for pod in fleet] == [Place("n"), Place("n")]
    assert fleet.members_version != version
