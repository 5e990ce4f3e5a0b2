"""All pods of a kind become unready at once, as when their node's API server was away."""

import pytest

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend


def pod(
    name: str, *, ready: bool, leaving: bool = False, role: Role = Role.DECODE
) -> DiscoveredBackend:
    backend = Backend(name, f"http://10.0.0.1:8000/{name}", role=role, models=("m",))
    return DiscoveredBackend(backend, f"uid-{name}", serving=ready, leaving=leaving)


def chosen(fleet: Fleet) -> list[str]:
    return [pod.name for pod in fleet.ready_pods("m")]


def test_pods_that_were_ready_stay_in_use_when_none_is(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    prefill = pod("p", ready=True, role=Role.PREFILL)
    fleet.apply([pod("a", ready=True), pod("b", ready=True), pod("new", ready=False), prefill])
    assert chosen(fleet) == ["a", "b", "p"]
    # One after the other, as their node reports them.
    fleet.apply([pod("a", ready=False), pod("b", ready=True), pod("new", ready=False), prefill])
    assert chosen(fleet) == ["b", "p"], "one unready pod is believed"
    for _ in range(2):
        unready = [pod(name, ready=False) for name in ("a", "b", "new")]
        fleet.apply([*unready, prefill])
        assert chosen(fleet) == ["a", "b", "p"], "not one that was never ready"
    assert caplog.text.count("all decode pods are unready") == 1
    # Their own checks decide: these stop answering.
    for members in fleet.backends:
        members.pods[0].healthy = members.pods[0].name != "a"
    fleet.invalidate_views()
    assert chosen(fleet) == ["b", "p"]
    fleet.apply([pod("a", ready=True), pod("b", ready=False), pod("new", ready=True), prefill])
    for members in fleet.backends:
        members.pods[0].healthy = True
    fleet.invalidate_views()
    assert chosen(fleet) == ["a", "new", "p"], "some are ready again: that is believed"


def test_pods_that_leave_are_not_doubted() -> None:
    fleet = Fleet()
    fleet.apply([pod("a", ready=True), pod("b", ready=True)])
    fleet.apply([pod("a", ready=False, leaving=True), pod("b", ready=False, leaving=True)])
    assert chosen(fleet) == []
