"""Pairs of pods: which may serve one request together."""

from tandem_contract.config import Backend
from tandem_contract.paths import Role
from tandem_epp.backends.pairing import can_prefill_for
from tandem_epp.backends.pods import Pod


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
    assert not can_prefill_for(v, u), "not between two unified backends"
