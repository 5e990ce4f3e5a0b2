"""The operator after failures of the cluster: it recovers by itself when the API server is back."""

import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem_contract.metrics import OPERATOR_LEADER
from tandem_kube.client import Api
from tandem_kube.errors import ApiError
from tandem_kube.resources import CUSTOM_RESOURCE_DEFINITIONS, INFERENCE_POOLS, PODS

from ..cluster.control_plane import ControlPlane
from ..cluster.fixtures import CRDS
from .killing import proxy
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    Operator,
    api_of,
    decode,
    names,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane


async def recovers(holds: Callable[[], Awaitable[bool]], operator: Operator, failure: str) -> None:
    """Wait until `holds` and print how long that took."""
    started = time.monotonic()

    async def answered() -> bool:
        try:
            return await holds()
        except ApiError:
            return False

    await until(answered, operator)
    print(f"{failure}: recovered in {time.monotonic() - started:.1f} s")


def pod_count(api: Api, namespace: str, expected: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return len(await names(api, namespace)) == expected

    return holds


def allow(cluster: ControlPlane, user: str, namespace: str) -> None:
    """Let `user` do everything in a namespace, and nothing elsewhere."""
    cluster.kubectl(
        *("create", "rolebinding", "operator", "--clusterrole=cluster-admin"),
        *(f"--user={user}", f"--namespace={namespace}"),
    )


@pytest.mark.timeout(180)
async def test_the_deletion_of_a_watched_namespace_leaves_the_others_alone(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    user, other = f"operator-{namespace}", f"{namespace}-other"
    crds.kubectl("create", "namespace", other)
    for name in (namespace, other):
        allow(crds, user, name)
    both = f"--namespace={namespace}", f"--namespace={other}"
    kubeconfig = crds.kubeconfig_for(user)
    async with api_of(crds.kubeconfig) as api, proxy(kubeconfig, tmp_path) as between:
        flags = f"--kubeconfig={between.kubeconfig}", "--no-leader-elect"
        with operating(tmp_path / "operator.log", *flags, *both) as operator:
            await api.create(PREFILL_POOLS, prefill("p", other))
            await until(pod_count(api, other, 1), operator)

            crds.kubectl("delete", "namespace", other)
            # An API server ends watches after minutes; only new ones are forbidden.
            between.cut_watches()
            between.forget()
            await until(lambda: "is forbidden" in operator.log, operator)
            await api.create(PREFILL_POOLS, prefill("p", namespace))
            await until(pod_count(api, namespace, 1), operator)

            crds.kubectl("create", "namespace", other)
            allow(crds, user, other)
            await api.create(PREFILL_POOLS, prefill("q", other, replicas=2))
            await recovers(pod_count(api, other, 2), operator, "a namespace that came back")
            assert operator.running
    crds.kubectl("delete", "namespace", other, "--wait=false")


@pytest.mark.timeout(180)
async def test_an_operator_that_starts_in_an_outage_waits_for_its_end(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        flags = (
            *(f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"),
            *(f"--lease-namespace={namespace}", "--lease-duration=10s"),
        )
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        with operating(tmp_path / "first.log", *flags) as first:
            await until(pod_count(api, namespace, 1), first)
            between.go_down()
            # A leader that lost its Lease exits, and the kubelet starts the container again.
            assert await first.ended() == 1
        await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)
        with operating(tmp_path / "second.log", *flags) as second:
            await until(lambda: second.log.count("trying again") >= 2, second)
            assert not await second.ready()
            between.come_back()
            await recovers(pod_count(api, namespace, 3), second, "an outage, over a restart")


# After 150 requests each of the 14 watches waits for the longest time, 10 s, as after 5 minutes.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("requests", [30, pytest.param(150, marks=pytest.mark.chaos)])
async def test_an_operator_goes_on_after_an_outage(
    crds: ControlPlane, namespace: str, tmp_path: Path, requests: int
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2))
        with operating(tmp_path / "first.log", *flags, "--no-leader-elect") as operator:
            await until(pod_count(api, namespace, 2), operator)
            between.go_down()
            await api.delete(PODS, (await names(api, namespace))[0], namespace)
            await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)
            await until(lambda: between.requests_while_down > requests, operator)
            between.come_back()
            await recovers(pod_count(api, namespace, 3), operator, "an outage")
            assert await operator.figure(OPERATOR_LEADER) == 1


@pytest.mark.timeout(180)
async def test_kinds_that_are_installed_later_are_used(
    crds: ControlPlane, gateway_definitions: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        between.hidden = "/apis/inference.networking.k8s.io"
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        routing = {"inferencePool": {"enabled": True}}
        spec = {"prefillRef": {"name": "p"}, "routing": routing}
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        await api.create(DECODE_POOLS, decode("d", namespace, **spec))
        with operating(tmp_path / "first.log", *flags, "--no-leader-elect") as operator:
            await until(pod_count(api, namespace, 2), operator)
            assert not (await api.list(INFERENCE_POOLS, namespace)).items
            between.hidden = ""

            async def has_inference_pool() -> bool:
                return len((await api.list(INFERENCE_POOLS, namespace)).items) == 1

            await recovers(has_inference_pool, operator, "a kind that was installed")


@pytest.mark.timeout(180)
async def test_the_operator_waits_for_its_custom_resource_definitions(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        between.hidden = CUSTOM_RESOURCE_DEFINITIONS.path()
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        with operating(tmp_path / "first.log", *flags, "--no-leader-elect") as operator:
            await until(lambda: "not installed in this cluster" in operator.log, operator)
            assert not await operator.ready()
            between.hidden = ""
            await recovers(pod_count(api, namespace, 1), operator, "CRDs that were installed")
            assert await operator.ready()
            operator.signal(signal.SIGTERM)
            assert await operator.ended() == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bumped_by", [0, 2000])
async def test_an_etcd_restored_to_an_older_state_is_noticed(
    control_plane: ControlPlane, tmp_path: Path, bumped_by: int
) -> None:
    # A control plane of its own: a restore takes the objects of other tests with it.
    namespace = "default"
    with ControlPlane.running(tmp_path) as cluster:
        cluster.kubectl("apply", "--server-side", f"--filename={CRDS}")
        cluster.wait_until_established(f"--filename={CRDS}")
        flags = f"--kubeconfig={cluster.kubeconfig}", f"--namespace={namespace}"
        async with api_of(cluster.kubeconfig) as api:
            with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
                await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2))
                await until(pod_count(api, namespace, 2), operator)
                # The backup has one pod, the state that it replaces three.
                await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 1}}, namespace)
                await until(pod_count(api, namespace, 1), operator)
                cluster.backup()
                await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)
                await until(pod_count(api, namespace, 3), operator)
                # The same generation as the edit that is restored away, with another spec.
                cluster.restore(bumped_by=bumped_by)
                await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 2}}, namespace)
                await recovers(pod_count(api, namespace, 2), operator, "a restored etcd")

                async def is_reported() -> bool:
                    status = (await api.get(PREFILL_POOLS, "p", namespace))["status"]
                    return bool(status["replicas"] == 2 == status["desiredReplicas"])

                await recovers(is_reported, operator, "the status")
