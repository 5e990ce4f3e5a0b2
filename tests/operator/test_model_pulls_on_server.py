"""A set with `prePull` on a real API server with the real Job controller, under an operator that is
killed after each of its writes. Only the kubelet is a substitute: it ends the Job's containers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.resources import CONTROLLER_REVISIONS, JOBS, PODS, Object

from ..cluster.control_plane import ControlPlane
from .fake_hub import COMMIT
from .killing import proxy
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    condition,
    decode,
    operating,
    pods,
    prefill,
    ready_status,
    set_status,
    until,
)
from .test_killed import is_complete, kill_after_each_write

pytestmark = pytest.mark.control_plane
MODEL = {"name": "org/model", "cache": {"claimName": "hub", "prePull": True}}


async def create_set(api: Api, namespace: str) -> None:
    engine = {"type": "vllm"}
    await api.create(PREFILL_POOLS, prefill("p", namespace, model=MODEL, engine=engine))
    await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))


def pull_status(pod: Object, error: str = "") -> Object:
    """The status of a pod of the Job whose containers have succeeded, or whose first has failed."""
    spec = pod["spec"]

    def ended(name: str, message: Any, code: int = 0) -> Object:
        state = {"exitCode": code, "message": message, "reason": "Error" if code else "Completed"}
        return {
            "name": name, "image": "tandem", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": state},
        }  # fmt: skip

    report = json.dumps({"bytes": 10, "files": 2})
    whole = json.dumps({"commit": COMMIT, "bytes": 50, "files": 10})
    names = [container["name"] for container in spec["initContainers"]]
    init = [ended(name, whole if name == "resolve" else report) for name in names]
    if error:
        return {
            "phase": "Failed", "podIP": "10.0.0.1",
            "initContainerStatuses": [ended("resolve", error, 1)],
        }  # fmt: skip
    return {
        "phase": "Succeeded", "podIP": "10.0.0.1", "initContainerStatuses": init,
        "containerStatuses": [ended(spec["containers"][0]["name"], report)],
    }  # fmt: skip


@asynccontextmanager
async def kubelet(api: Api, namespace: str, error: str = "") -> AsyncIterator[None]:
    """Make serving pods ready and end the Job's pods, until the block ends."""

    ending = asyncio.Event()

    async def run() -> None:
        while not ending.is_set():
            for pod in (await api.list(PODS, namespace)).items:
                if "deletionTimestamp" in pod["metadata"] or "podIP" in pod["status"]:
                    continue
                is_pull = labels.MODEL_PULL in pod["metadata"]["labels"]
                status = pull_status(pod, error) if is_pull else ready_status()
                await set_status(api, namespace, pod["metadata"]["name"], status)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        # Not cancelled, as in `operating.kubelet`.
        ending.set()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.timeout(300)
async def test_pods_of_a_set_run_the_commit_of_its_job_whatever_write_kills_the_operator(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with (
        api_of(crds.kubeconfig) as api,
        proxy(crds.kubeconfig, tmp_path) as between,
        kubelet(api, namespace),
    ):
        # The Job's pod and the pools' keep to the strictest standard.
        enforced = "pod-security.kubernetes.io/enforce=restricted"
        crds.kubectl("label", "namespace", namespace, enforced)
        await create_set(api, namespace)
        kills = await kill_after_each_write(
            between, api, namespace, tmp_path / "operator.log", is_complete
        )
        # At least: the Job, two revisions, two pods, and the Job's deletion.
        assert kills >= 6
        revisions = (await api.list(CONTROLLER_REVISIONS, namespace)).items
        assert len(revisions) == 2
        for body in [*revisions, *(await pods(api, namespace))]:
            spec = body["data"]["spec"] if "data" in body else body["spec"]
            args = spec["containers"][0]["args"]
            assert args[args.index("--revision") + 1] == COMMIT
        assert not (await api.list(JOBS, namespace)).items
        for resource, name in ((PREFILL_POOLS, "p"), (DECODE_POOLS, "d")):
            pool = await api.get(resource, name, namespace)
            assert pool["status"]["modelPull"] == {"commit": COMMIT}


async def test_a_failed_download_is_a_condition_in_its_own_words(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    words = "org/model is gated: accept its terms on https://huggingface.co"
    async with api_of(crds.kubeconfig) as api, kubelet(api, namespace, words):
        await create_set(api, namespace)
        flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
        with operating(tmp_path / "operator.log", *flags) as operator:

            async def is_reported() -> bool:
                ready = condition(await api.get(DECODE_POOLS, "d", namespace), "Ready")
                is_failure = ready.get("reason") == "ModelPullFails"
                return is_failure and words in ready["message"]

            await until(is_reported, operator)
        (job,) = (await api.list(JOBS, namespace)).items
        # The API server has taken the Job as it is, and garbage collection removes it with its
        # owner.
        assert job["spec"]["ttlSecondsAfterFinished"] == 600
        await api.delete(DECODE_POOLS, "d", namespace)
        await api.delete(PREFILL_POOLS, "p", namespace)

        async def is_gone() -> bool:
            return not (await api.list(JOBS, namespace)).items

        await until(is_gone)


GROUPS = ("", "apps", "events.k8s.io", "networking.k8s.io", "policy", "rbac.authorization.k8s.io")
"""API groups of an older chart's Role, beside `tandem.dev`: it has no `batch`."""


async def test_without_the_right_to_jobs_the_pools_that_need_none_are_served(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    rule = {"apiGroups": [*GROUPS, labels.GROUP], "resources": ["*"], "verbs": ["*"]}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "older", "namespace": namespace}, "rules": [rule],
    }  # fmt: skip
    crds.kubectl("create", "--filename=-", input=json.dumps(role))
    user = ("--role=older", f"--user={namespace}", f"--namespace={namespace}")
    crds.kubectl("create", "rolebinding", "older", *user)
    kubeconfig = crds.kubeconfig_for(namespace)
    flags = f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    async with api_of(crds.kubeconfig) as api:
        await create_set(api, namespace)
        await api.create(PREFILL_POOLS, prefill("other", namespace))
        with operating(tmp_path / "operator.log", *flags) as operator:

            async def is_served() -> bool:
                owners = [
                    pod["metadata"]["labels"][labels.POOL] for pod in await pods(api, namespace)
                ]
                ready = condition(await api.get(PREFILL_POOLS, "p", namespace), "Ready")
                return owners == ["other"] and ready.get("reason") == "Forbidden"

            await until(is_served, operator)
