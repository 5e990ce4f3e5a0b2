"""Two replicas: one leads, and when it dies or is cut off the other takes over."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tandem_contract.metrics import OPERATOR_LEADER
from tandem_kube.client import Api
from tandem_kube.resources import LEASES
from tandem_operator.runtime.leader import LEASE_NAME, Leadership, LeaseTimes

from ..cluster.control_plane import ControlPlane
from .killing import proxy
from .operating import (
    PREFILL_POOLS,
    AuditedWrites,
    Operator,
    api_of,
    names,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane


async def leads(operator: Operator) -> bool:
    return await operator.figure(OPERATOR_LEADER) == 1


async def test_a_follower_takes_over_and_creates_no_pod_twice(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api:
        with operating(tmp_path / "first.log", *flags(crds.kubeconfig, namespace)) as first:
            await until(lambda: leads(first), first)
            with operating(tmp_path / "second.log", *flags(crds.kubeconfig, namespace)) as second:
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


@pytest.mark.timeout(180)
async def test_a_leader_that_was_stopped_writes_nothing_after_its_successor(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    users = [f"{name}-{namespace}" for name in ("first", "second")]
    first_user, second_user = (
        crds.kubeconfig_for(user, groups=("system:masters",)) for user in users
    )
    written, later = (AuditedWrites(crds.audit_log, user) for user in users)
    async with api_of(crds.kubeconfig) as api:
        with operating(tmp_path / "first.log", *flags(first_user, namespace)) as first:
            await until(lambda: leads(first), first)
            with operating(tmp_path / "second.log", *flags(second_user, namespace)) as second:
                await api.create(PREFILL_POOLS, prefill("p", namespace))
                async with edits(api, namespace):
                    await until(lambda: len(written.read()) > 20, first)
                    first.signal(signal.SIGSTOP)
                    await until(lambda: len(later.read()) > 20, second)
                    assert await leads(second)
                    first.signal(signal.SIGCONT)
                    assert await first.ended() == 1
                    await until(second.ready, second)
    assert "the Lease could not be renewed" in first.log
    assert_one_writer_at_a_time(written, later)


@pytest.mark.timeout(180)
async def test_a_leader_whose_renewal_hangs_writes_nothing_after_its_successor(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    users = [f"{name}-{namespace}" for name in ("first", "second")]
    first_user, second_user = (
        crds.kubeconfig_for(user, groups=("system:masters",)) for user in users
    )
    written, later = (AuditedWrites(crds.audit_log, user) for user in users)
    never = asyncio.Event()

    async def hang(request: web.Request) -> None:
        if "/leases" in request.path:
            await never.wait()

    async with api_of(crds.kubeconfig) as api, proxy(first_user, tmp_path) as between:
        with operating(tmp_path / "first.log", *flags(between.kubeconfig, namespace)) as first:
            await until(lambda: leads(first), first)
            with operating(tmp_path / "second.log", *flags(second_user, namespace)) as second:
                await api.create(PREFILL_POOLS, prefill("p", namespace))
                async with edits(api, namespace):
                    await until(lambda: len(written.read()) > 20, first)
                    between.before = hang
                    await until(lambda: len(later.read()) > 20, second)
                    assert await first.ended() == 1
    assert_one_writer_at_a_time(written, later)


async def test_an_election_that_ends_by_an_error_is_a_lost_lease() -> None:
    class FakeApi:
        async def get(self, *_: object) -> None:
            raise ZeroDivisionError

    async def lose() -> None:
        async with Leadership(FakeApi(), "n", "i", LeaseTimes()) as leadership:  # type: ignore[arg-type]
            await leadership.lost.wait()
            assert not leadership.may_write()

    with pytest.raises(ZeroDivisionError):
        await lose()


def flags(kubeconfig: Path, namespace: str) -> tuple[str, ...]:
    return (
        *(f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"),
        *(f"--lease-namespace={namespace}", "--lease-duration=12s"),
    )


@asynccontextmanager
async def edits(api: Api, namespace: str) -> AsyncIterator[None]:
    """Change the number of replicas all the time, so that each leader has something to write."""

    ending = asyncio.Event()

    async def run() -> None:
        for number in itertools.count():
            if ending.is_set():
                return
            spec = {"replicas": 1 + number % 2}
            await api.patch(PREFILL_POOLS, "p", {"spec": spec}, namespace)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        # Not cancelled, as in `operating.kubelet`.
        ending.set()
        await asyncio.gather(task, return_exceptions=True)


def assert_one_writer_at_a_time(first: AuditedWrites, second: AuditedWrites) -> None:
    """By the API server's audit log, which has microseconds."""
    before = [event["stageTimestamp"] for event in first.read()]
    after = [event["requestReceivedTimestamp"] for event in second.read()]
    assert before
    assert after
    assert max(before) < min(after)


def test_the_lease_outlasts_the_renew_deadline() -> None:
    times = LeaseTimes.for_duration(3.0)
    assert times.duration > times.renew > 1.2 * times.retry >= 1.2
    assert LeaseTimes.for_duration(15.0) == LeaseTimes()
