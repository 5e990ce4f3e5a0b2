"""The Secret of a set's transfer keys on a real API server."""

from pathlib import Path

import pytest

from tandem_kube.resources import SECRETS, Resource

from ..cluster.control_plane import ControlPlane
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    condition,
    decode,
    operating,
    pods,
    prefill,
    until,
)

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


async def test_a_secret_that_the_api_server_refuses_is_named_until_it_is_allowed(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    quotas = Resource("v1", "resourcequotas")
    quota = {"metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": {"secrets": "0"}}}
    async with api_of(crds.kubeconfig) as api:
        await api.create(quotas, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})

        async def is_counted() -> bool:
            return "hard" in (await api.get(quotas, "q", namespace)).get("status", {})

        await until(is_counted)
        await api.create(PREFILL_POOLS, prefill("p", namespace))
        await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))
        with operating(tmp_path / "operator.log", *flags) as operator:

            async def is_refused() -> bool:
                states = [
                    condition(await api.get(DECODE_POOLS, "d", namespace), kind)
                    for kind in ("Reconciling", "PodsReady")
                ]
                return all(
                    state.get("reason") == "QuotaExceeded"
                    and "wait for the Secret p-transfer-keys" in state["message"]
                    for state in states
                )

            await until(is_refused, operator)
            assert await pods(api, namespace) == []
            await api.delete(quotas, "q", namespace)

            async def has_pods() -> bool:
                return len(await pods(api, namespace)) == 2

            await until(has_pods, operator)
            await api.get(SECRETS, "p-transfer-keys", namespace)
