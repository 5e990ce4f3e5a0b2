"""The relist finds objects deleted while the watches were broken and their versions expired."""

from pathlib import Path

import pytest

from tandem_kube.resources import PODS

from ..cluster.control_plane import ControlPlane
from .killing import proxy
from .operating import PREFILL_POOLS, api_of, names, operating, pods, prefill, until

pytestmark = pytest.mark.control_plane


async def test_a_pod_deleted_while_no_watch_was_open_is_replaced(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with api_of(crds.kubeconfig) as api, proxy(crds.kubeconfig, tmp_path) as between:
        flags = f"--kubeconfig={between.kubeconfig}", f"--namespace={namespace}"
        with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
            await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2))

            async def has_two_pods() -> bool:
                return len(await names(api, namespace)) == 2

            await until(has_two_pods, operator)
            lost, _ = await pods(api, namespace)
            between.cut_watches()
            await api.delete(PODS, lost["metadata"]["name"], namespace)
            between.forget()

            async def replaced() -> bool:
                uids = {pod["metadata"]["uid"] for pod in await pods(api, namespace)}
                return len(uids) == 2 and lost["metadata"]["uid"] not in uids

            await until(replaced, operator)
