"""Data-parallel ranks as pods of their own."""

from tandem_contract.config import Backend
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend


def discovered(name: str = "a", uid: str = "", **fields: object) -> DiscoveredBackend:
    backend = Backend(name, f"http://10.0.0.1/{name}", **fields)  # type: ignore[arg-type]
    return DiscoveredBackend(backend, uid)


def test_a_backend_becomes_one_pod_per_rank() -> None:
    fleet = Fleet()
    fleet.apply([discovered("a"), discovered("b")])
    view = fleet.ready_pods(None)
    members, _ = fleet.backends
    fleet.set_ranks(members, 2)
    assert [(pod.name, pod.rank) for pod in fleet] == [("a_dp0", 0), ("a_dp1", 1), ("b", None)]
    assert len(fleet.ready_pods(None)) == len(fleet) == 3
    assert fleet.ready_pods(None) != view
    fleet.set_ranks(members, 1)
    assert [(pod.name, pod.rank) for pod in fleet] == [("a", None), ("b", None)]


def test_ranks_keep_their_state_while_the_backend_is_the_same() -> None:
    fleet = Fleet()
    fleet.apply([discovered()])
    (members,) = fleet.backends
    fleet.set_ranks(members, 2)
    first, second = fleet
    second.in_flight = 7
    fleet.apply([discovered(models=("m",))])
    assert list(fleet) == [first, second]
    assert second.backend.models == ("m",)
    fleet.set_ranks(members, 3)
    assert list(fleet)[:2] == [first, second]
    fleet.apply([discovered(uid="another")])
    assert [(pod.name, pod.in_flight) for pod in fleet] == [("a", 0)], "a new pod, not scraped yet"


def test_a_rank_shares_address_and_readiness_of_its_backend() -> None:
    fleet = Fleet()
    fleet.apply([discovered()])
    (members,) = fleet.backends
    (only,) = fleet
    only.address = "10.0.0.9:80"
    fleet.set_ranks(members, 2)
    assert [(pod.address, pod.ready) for pod in fleet] == [("10.0.0.9:80", True)] * 2
    fleet.apply([DiscoveredBackend(only.backend, serving=False, leaving=True)])
    assert fleet.ready_pods(None) == ()


def test_a_replaced_pod_has_another_number() -> None:
    fleet, numbers = Fleet(), set()
    for uid in range(100):
        # The pod before is freed, so that the new one may have its place in memory.
        fleet.apply([discovered(uid=str(uid))])
        numbers.update(pod.number for pod in fleet)
    assert len(numbers) == 100


def test_a_response_header_names_a_pod_by_name_or_address() -> None:
    fleet = Fleet()
    fleet.apply([discovered("a"), DiscoveredBackend(Backend("b", "http://unresolved:8000"))])
    pod, unresolved = fleet
    assert pod.is_named("a")
    assert pod.is_named(pod.address)
    assert not pod.is_named("b")
    assert not unresolved.is_named(None), "no name is not the address of a pod that has none"
