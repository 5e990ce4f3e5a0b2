"""Two replicas: one leads, and when it dies the other takes over."""

import signal
from pathlib import Path

import pytest

from tandem_contract.metrics import OPERATOR_LEADER
from tandem_kube.resources import LEASES
from tandem_operator.runtime.leader import LEASE_NAME, LeaseTimes

from ..cluster.control_plane import ControlPlane
from .operating import PREFILL_POOLS, Operator, api_of, names, operating, prefill, until

pytestmark = pytest.mark.control_plane


async def leads(operator: Operator) -> bool:
    return await operator.figure(OPERATOR_LEADER) == 1


async def test_a_follower_takes_over_and_creates_no_pod_twice(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (
        *(f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}"),
        *(f"--lease-namespace={namespace}", "--lease-duration=3s"),
    )
    async with api_of(crds.kubeconfig) as api:
        with operating(tmp_path / "first.log", *flags) as first:
            await until(lambda: leads(first), first)
            with operating(tmp_path / "second.log", *flags) as second:
                await until(second.ready, second)
                await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=3))

                async def has_three_pods() -> bool:
                    return len(await names(api, namespace)) == 3

                await until(has_three_pods, first)
                assert not await leads(second)
                before = await names(api, namespace)

                first.signal(signal.SIGKILL)
                await until(lambda: leads(second), second)
                await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 4}}, namespace)

                async def has_four_pods() -> bool:
                    return len(await names(api, namespace)) == 4

                await until(has_four_pods, second)
                assert set(before) < set(await names(api, namespace))

                second.signal(signal.SIGTERM)
                assert await second.ended() == 0
                lease = await api.get(LEASES, LEASE_NAME, namespace)
                assert lease["spec"]["holderIdentity"] == ""
                assert lease["spec"]["leaseTransitions"] == 1


def test_the_lease_outlasts_the_renew_deadline() -> None:
    times = LeaseTimes.for_duration(3.0)
    assert times.duration > times.renew > 1.2 * times.retry >= 1.2
    assert LeaseTimes.for_duration(15.0) == LeaseTimes()
