"""The network forgets connections and tells neither end: a node lost its connection tracking, or a
load balancer failed over. New connections work."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_kube.reflector import QUIET_SECONDS

from ..cluster.control_plane import ControlPlane
from ..cluster.fixtures import LEFT_OUT
from ..kube.apis import proxied
from ..namespaces import Namespaces, NotPermitted, namespaces
from .operating import PREFILL_POOLS, api_of, operating, prefill, until
from .test_recovery import pod_count, recovers

pytestmark = [pytest.mark.control_plane, pytest.mark.timeout(180)]


@pytest.fixture
def networks(ip_program: None) -> Iterator[Namespaces]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces(["operator"]))
        except NotPermitted as err:
            pytest.skip(f"{LEFT_OUT}needs network namespaces: {err}")
        yield made


async def test_changes_are_seen_before_a_silent_watch_is_doubted(
    crds: ControlPlane, namespace: str, tmp_path: Path, networks: Namespaces
) -> None:
    """The kernel notices it; the leader keeps its Lease."""
    async with (
        api_of(crds.kubeconfig) as api,
        proxied(crds.kubeconfig, tmp_path, networks.store) as (_, kubeconfig),
    ):
        flags = (
            *(f"--kubeconfig={kubeconfig}", f"--namespace={namespace}"),
            f"--lease-namespace={namespace}",
        )
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        with operating(
            tmp_path / "operator.log", *flags, network=networks.names["operator"]
        ) as operator:
            await until(pod_count(api, namespace, 1), operator)
            networks.forget_connections("operator")
            await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)
            async with asyncio.timeout(QUIET_SECONDS / 2):
                await recovers(pod_count(api, namespace, 3), operator, "forgotten connections")
            assert operator.running, operator.log
