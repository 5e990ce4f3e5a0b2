"""The Secret of a set's transfer keys on a real API server."""

from pathlib import Path

import pytest

from tandem_kube.resources import SECRETS

from ..cluster.control_plane import ControlPlane
from .operating import DECODE_POOLS, PREFILL_POOLS, api_of, decode, operating, pods, prefill, until

pytestmark = pytest.mark.control_plane


async def test_the_secret_is_there_for_the_pods_of_both_pools(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api:
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))
        with operating(tmp_path / "operator.log", *flags) as operator:

            async def has_pods() -> bool:
                return len(await pods(api, namespace)) == 2

            await until(has_pods, operator)
            secret = await api.get(SECRETS, "p-transfer-keys", namespace)
            assert len(secret["data"]) == 1
            mounted = [
                volume["secret"]["secretName"]
                for pod in await pods(api, namespace)
                for volume in pod["spec"]["volumes"]
                if volume["name"] == "transfer-keys"
            ]
            assert mounted == ["p-transfer-keys"] * 2
            # A second pass over the set makes no second key.
            await api.patch(
                PREFILL_POOLS, "p", {"metadata": {"annotations": {"a": "b"}}}, namespace
            )
            again = await api.get(SECRETS, "p-transfer-keys", namespace)
            assert again["data"] == secret["data"]
