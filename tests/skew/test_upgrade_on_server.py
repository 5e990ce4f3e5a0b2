"""Today's operator takes over revisions and pods of the older version on a real API server."""

from pathlib import Path

import pytest

from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_kube.client import Api

from ..cluster.control_plane import ControlPlane
from ..operator.operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    condition,
    operating,
    pods,
    ready_status,
    set_status,
    until,
)
from ..operator.test_golden_manifests import POOLS
from .older_pools import create_older_set

pytestmark = pytest.mark.control_plane
RESOURCES = {DECODE_POOL: DECODE_POOLS, PREFILL_POOL: PREFILL_POOLS}
NEWER = "tandem:newer"


@pytest.mark.parametrize("case", ["torch", "nixl"])
async def test_pods_of_the_older_version_stay(
    case: str, crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api:
        before = await create_older_set(api, namespace, case)
        for name in before:
            await set_status(api, namespace, name, ready_status())
        log = tmp_path / "operator.log"
        with operating(log, *flags, f"--tandem-image={NEWER}") as operator:

            async def are_taken_over() -> bool:
                pools = [
                    await api.get(RESOURCES[pool["kind"]], pool["metadata"]["name"], namespace)
                    for pool in POOLS[case]
                ]
                return all(
                    condition(pool, "UpdateAvailable").get("status") == "True" for pool in pools
                )

            await until(are_taken_over, operator)
            assert await _uids(api, namespace) == before


async def _uids(api: Api, namespace: str) -> dict[str, str]:
    staying = await pods(api, namespace)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in staying}
