"""The operator process patches the sidecar's settings on running pods of a real API server."""

import json
from pathlib import Path

import pytest

from tandem_contract import labels
from tandem_kube.resources import PODS

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


async def test_an_edit_of_the_section_sidecar_replaces_no_pod(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api, kubelet(api, namespace):
        await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=1))
        spec = {"prefillRef": {"name": "p"}, "replicas": 2}
        await api.create(DECODE_POOLS, decode("d", namespace, **spec))

        async def retries() -> list[int]:
            texts = [
                pod["metadata"]["annotations"].get(labels.SIDECAR_FLAGS, "")
                for pod in await pods(api, namespace)
            ]
            return [json.loads(text)["retries"] for text in texts if text]

        async def uids() -> set[str]:
            return {pod["metadata"]["uid"] for pod in await pods(api, namespace)}

        async def is_observed() -> bool:
            pool = await api.get(DECODE_POOLS, "d", namespace)
            status = pool.get("status", {})
            return status.get("observedGeneration") == pool["metadata"]["generation"]

        with operating(tmp_path / "operator.log", *flags) as operator:

            async def have_retries(*expected: int) -> bool:
                return await retries() == list(expected) and await is_observed()

            await until(lambda: have_retries(2, 2), operator)
            before = await uids()
            edit = {"spec": {"sidecar": {"retries": 4}}}
            await api.patch(DECODE_POOLS, "d", edit, namespace)
            await until(lambda: have_retries(4, 4), operator)
            assert await uids() == before
            pod = next(p for p in await pods(api, namespace) if p["metadata"]["name"][0] == "d")
            patch = {"metadata": {"annotations": {labels.SIDECAR_FLAGS: None}}}
            await api.patch(PODS, pod["metadata"]["name"], patch, namespace)
            await until(lambda: have_retries(4, 4), operator)
            assert await uids() == before
