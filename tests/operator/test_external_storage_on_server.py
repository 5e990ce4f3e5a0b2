"""The operator process patches the bounds of an external store on pods of a real API server."""

import json
from pathlib import Path

import pytest

from tandem_contract import labels

from ..cluster.control_plane import ControlPlane
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    decode,
    kubelet,
    operating,
    pods,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane

STORE = {"endpoint": "http://store:8080", "capacity": "2Gi", "image": "registry/storage:1"}


async def test_an_edit_of_the_bounds_replaces_no_pod(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api, kubelet(api, namespace):
        stored = prefill("p", namespace, replicas=1, transfer={"storage": STORE})
        await api.create(PREFILL_POOLS, stored)
        await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))

        async def have_bounds(**bounds: float) -> bool:
            """Whether the pods of both sides are there, each with these bounds."""
            found = [
                json.loads(pod["metadata"]["annotations"].get(labels.STORAGE_BOUNDS, "null"))
                for pod in await pods(api, namespace)
            ]
            return len(found) == 2 and all(each == bounds for each in found)

        async def uids() -> set[str]:
            return {pod["metadata"]["uid"] for pod in await pods(api, namespace)}

        with operating(tmp_path / "operator.log", *flags) as operator:
            await until(lambda: have_bounds(capacity_bytes=2 << 30), operator)
            before = await uids()
            edit = {"spec": {"transfer": {"storage": {"capacity": None, "maxAge": "24h"}}}}
            await api.patch(PREFILL_POOLS, "p", edit, namespace)
            await until(lambda: have_bounds(max_age_seconds=86400.0), operator)
            assert await uids() == before
