"""The number of replicas of a pool on a real API server: /scale, an HPA, GitOps, `scaling`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.resources import Object

from ..cluster.control_plane import ControlPlane
from ..cluster.kubectl import Failed
from .operating import (
    PREFILL_POOLS,
    Operator,
    api_of,
    condition,
    kubelet,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane


ALL_BUT_POOLS = ("", "apps", "policy", "networking.k8s.io", "rbac.authorization.k8s.io",
                 "events.k8s.io")  # fmt: skip
"""API groups in which the operator writes, without its own."""


@asynccontextmanager
async def operated(crds: ControlPlane, namespace: str, folder: Path) -> AsyncIterator["Pool"]:
    """The pool `p`, which states no number, once the operator has reported on what it wrote."""
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api:
        with operating(folder / "operator.log", *flags) as operator:
            pool = Pool(crds, namespace, api, operator)
            pool.git_ops_apply()
            await pool.settles(replicas=1)
            yield pool


class Pool:
    """PrefillPool `p`, and those who change it."""

    def __init__(self, crds: ControlPlane, namespace: str, api: Api, operator: Operator) -> None:
        self._crds, self._namespace, self._api = crds, namespace, api
        self.operator = operator

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self._crds.kubectl(*arguments, f"--namespace={self._namespace}", **options)

    def git_ops_apply(self, **spec: Any) -> None:
        """Server-side apply of all that the repository has, as Flux does."""
        self.kubectl(
            *("apply", "--server-side", "--field-manager=git-ops", "--filename=-"),
            input=json.dumps(prefill("p", self._namespace, **spec)),
        )

    async def body(self) -> Object:
        return await self._api.get(PREFILL_POOLS, "p", self._namespace)

    async def settles(self, *, replicas: int | None, desired: int | None = None) -> None:
        """Wait until the spec has `replicas` and the status reports on that very generation."""

        async def holds() -> bool:
            body = await self.body()
            status = body.get("status", {})
            return bool(
                body["spec"].get("replicas") == replicas
                and status.get("observedGeneration") == body["metadata"]["generation"]
                and status.get("desiredReplicas") == (replicas if desired is None else desired)
            )

        await until(holds, self.operator)


async def test_scale_and_git_ops_share_a_pool_without_a_number(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with operated(crds, namespace, tmp_path) as pool:
        assert (await pool.body())["metadata"]["generation"] == 2
        pool.kubectl("scale", "pp/p", "--replicas=3", "--current-replicas=1")
        await pool.settles(replicas=3)
        # The next synchronization conflicts with nothing and leaves the number alone.
        pool.git_ops_apply(drain={"timeout": "60s"})
        await pool.settles(replicas=3)
        # A number in the repository is the repository's from then on, by force or not.
        with pytest.raises(Failed, match=r"conflict"):
            pool.git_ops_apply(replicas=2)
        # Whoever removed it without having stated it (kubectl replace) gets it back.
        pool.kubectl("patch", "pp/p", "--type=merge", '--patch={"spec":{"replicas":null}}')
        await pool.settles(replicas=3)


async def test_scaling_is_admitted_and_the_operators_number_goes(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with operated(crds, namespace, tmp_path) as pool:
        pool.git_ops_apply(scaling={"minReplicas": 2, "maxReplicas": 4})
        await pool.settles(replicas=None, desired=2)
        with pytest.raises(Failed, match=r"replicas and scaling exclude each other"):
            pool.kubectl("scale", "pp/p", "--replicas=3")
        pool.git_ops_apply()
        await pool.settles(replicas=2)


async def test_scaling_beside_the_number_of_an_autoscaler(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with operated(crds, namespace, tmp_path) as pool:
        pool.kubectl("scale", "pp/p", "--replicas=3")
        pool.git_ops_apply(scaling={"minReplicas": 2, "maxReplicas": 4})
        await pool.settles(replicas=3, desired=2)
        # The pool stays editable, in every field but the one without effect.
        pool.git_ops_apply(scaling={"minReplicas": 1, "maxReplicas": 4}, paused=True)
        await pool.settles(replicas=3, desired=1)
        for number in (2, 4):
            with pytest.raises(Failed, match=r"replicas and scaling exclude each other"):
                pool.kubectl("scale", "pp/p", f"--replicas={number}")


async def test_an_hpa_scales_a_pool_without_a_number(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """Kubernetes' own controller. Its bounds need no metrics, which this cluster does not have."""
    async with operated(crds, namespace, tmp_path) as pool:
        target = {"apiVersion": labels.API_VERSION, "kind": "PrefillPool", "name": "p"}
        hpa = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "p"},
            "spec": {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5},
        }
        pool.kubectl("create", "--filename=-", input=json.dumps(hpa))
        await pool.settles(replicas=3)
        pool.git_ops_apply(paused=True)
        await pool.settles(replicas=3)


async def test_without_the_right_to_write_the_number_the_pods_run_and_the_pool_says_why(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The rights of an operator whose roles are not the chart's and date from before."""
    user = f"operator-{namespace}"
    rules = [
        {"apiGroups": ALL_BUT_POOLS, "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": ["tandem.dev"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["tandem.dev"], "resources": ["*/status"], "verbs": ["patch"]},
        {"apiGroups": ["tandem.dev"], "resources": ["*/finalizers"], "verbs": ["update"]},
    ]
    meta = {"metadata": {"name": "operator", "namespace": namespace}}
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "rules": rules, **meta}
    binding = {
        "apiVersion": f"{group}/v1", "kind": "RoleBinding", **meta,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "operator"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }  # fmt: skip
    for body in (role, binding):
        crds.kubectl("create", "--filename=-", input=json.dumps(body))
    flags = f"--kubeconfig={crds.kubeconfig_for(user)}", f"--namespace={namespace}"
    async with api_of(crds.kubeconfig) as api, kubelet(api, namespace):
        with operating(tmp_path / "operator.log", *flags, "--no-leader-elect") as operator:
            await api.create(PREFILL_POOLS, prefill("p", namespace))

            async def is_reported() -> bool:
                pool = await api.get(PREFILL_POOLS, "p", namespace)
                reported = condition(pool, "Reconciling")
                return (
                    reported.get("reason") == "Forbidden"
                    and "cannot patch resource" in reported["message"]
                    and condition(pool, "PodsReady")["status"] == "True"
                )

            await until(is_reported, operator)
