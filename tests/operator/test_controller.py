"""The operator as a process against a real API server: normal operation and failures."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import labels
from tandem_contract.metrics import OPERATOR_RECONCILES
from tandem_kube.client import Api
from tandem_kube.errors import NotFound
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    PODS,
    SECRETS,
    Object,
    Resource,
)

from ..cluster.control_plane import ControlPlane
from . import operating
from .operating import DECODE_POOLS, PREFILL_POOLS, condition, decode, kubelet, prefill, until

pytestmark = pytest.mark.control_plane
QUOTAS = Resource("v1", "resourcequotas")
NAMESPACES = Resource("v1", "namespaces")


@pytest.fixture
async def api(crds: ControlPlane) -> AsyncIterator[Api]:
    async with operating.api_of(crds.kubeconfig) as client:
        yield client


@pytest.fixture
def operator(crds: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[operating.Operator]:
    kubeconfig = crds.kubeconfig_for(f"operator-{namespace}", groups=("system:masters",))
    flags = f"--kubeconfig={kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    with operating.operating(tmp_path / "operator.log", *flags) as process:
        yield process


async def test_pools_get_pods_children_and_status_and_deletion_removes_them(
    api: Api, operator: operating.Operator, namespace: str, crds: ControlPlane
) -> None:
    await api.create(PREFILL_POOLS, prefill("p", namespace))
    await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}, replicas=2))

    async def ready() -> bool:
        pool = await api.get(DECODE_POOLS, "d", namespace)
        return condition(pool, "Ready").get("status") == "True"

    async with kubelet(api, namespace):
        await until(ready, operator)
        decode_pool = await api.get(DECODE_POOLS, "d", namespace)
        assert decode_pool["status"]["readyReplicas"] == 2
        assert decode_pool["status"]["endpoint"].startswith("http://d.")
        assert await named(api, DEPLOYMENTS, namespace) == ["d-envoy", "d-epp"]

        await api.patch(DECODE_POOLS, "d", {"spec": {"replicas": 4}}, namespace)
        await until(lambda: count(api, namespace, 5), operator)
        await api.patch(DECODE_POOLS, "d", {"spec": {"replicas": 1}}, namespace)
        await until(lambda: count(api, namespace, 2), operator)
        await until(ready, operator)

        await at_rest(api, crds, namespace, operator)
        for pool in (decode_pool, await api.get(PREFILL_POOLS, "p", namespace)):
            assert "finalizers" not in pool["metadata"]
            assert set(pool["metadata"].get("annotations", ())) <= {"example.com/note"}
            assert "kopf" not in str(pool["status"])
        assert "kopf" not in str(await api.list(PODS, namespace))

        await api.delete(DECODE_POOLS, "d", namespace)
        await api.delete(PREFILL_POOLS, "p", namespace)
        await until(lambda: count(api, namespace, 0), operator)
        for resource in (CONTROLLER_REVISIONS, DEPLOYMENTS):
            await until(lambda r=resource: empty(api, r, namespace), operator)


async def at_rest(
    api: Api, cluster: ControlPlane, namespace: str, operator: operating.Operator
) -> None:
    """Three reconciliations in a row, each after an irrelevant change, write nothing."""
    writes = operating.AuditedWrites(cluster.audit_log, f"operator-{namespace}")
    quiet, number = 0, 0
    while quiet < 3:
        before = len(writes.read())
        passes = await operator.figure(OPERATOR_RECONCILES)
        number += 1
        note = {"metadata": {"annotations": {"example.com/note": str(number)}}}
        await api.patch(PREFILL_POOLS, "p", note, namespace)

        async def passed(before: float = passes) -> bool:
            return await operator.figure(OPERATOR_RECONCILES) > before

        await until(passed, operator)
        after = writes.read()
        quiet = quiet + 1 if len(after) == before else 0
        assert number < 20, after[-5:]


async def test_deleted_plan_keys_come_back_before_the_next_pod_and_with_a_change(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    """No watch tells of them, and a pod that mounts them does not start without."""
    await api.create(PREFILL_POOLS, prefill("p", namespace))
    await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))

    async def has_keys() -> bool:
        try:
            return bool(await api.get(SECRETS, "d-plan-keys", namespace))
        except NotFound:
            return False

    async def is_at_rest() -> bool:
        pool = await api.get(DECODE_POOLS, "d", namespace)
        return "endpoint" in pool.get("status", {}) and await count(api, namespace, 2)

    await until(is_at_rest, operator)
    await until(has_keys, operator)
    (pod,) = [p for p in await operating.pods(api, namespace) if "d-" in p["metadata"]["name"]]
    await api.delete(SECRETS, "d-plan-keys", namespace)
    await api.delete(PODS, pod["metadata"]["name"], namespace)
    await until(has_keys, operator)
    await api.delete(SECRETS, "d-plan-keys", namespace)
    touched = {"metadata": {"annotations": {"example.com/keys": "now"}}}
    await api.patch(DECODE_POOLS, "d", touched, namespace)
    await until(has_keys, operator)


async def test_pods_that_mount_plan_keys_are_created_after_them_also_of_a_pool_that_is_back(
    api: Api, operator: operating.Operator, namespace: str, crds: ControlPlane
) -> None:
    """The kubelet tells FailedMount and waits longer and longer where a Secret is missing."""
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=0))
    for number in (1, 2):
        await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}, replicas=2))
        await until(lambda: count(api, namespace, 2), operator)
        written = [
            event["objectRef"]["resource"]
            for event in operating.AuditedWrites(crds.audit_log, f"operator-{namespace}").read()
            if event["objectRef"]["resource"] in ("secrets", "pods")
            and event["verb"] in ("create", "patch")
            and event["objectRef"].get("name") != "p-transfer-keys"
            and "dryRun" not in event["requestURI"]
            and event["objectRef"].get("subresource") is None
            and event["objectRef"]["namespace"] == namespace
        ]
        # A pool that is back finds the keys that it had.
        assert written == ["secrets", *["pods", "pods"] * number]
        if number == 1:
            await api.delete(DECODE_POOLS, "d", namespace)
            await until(lambda: count(api, namespace, 0), operator)


async def test_pods_whose_plan_keys_are_refused_are_tried_again_like_a_refused_write(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    """So each attempt waits longer than the one before."""
    keys = {"metadata": {"name": "p-transfer-keys", "namespace": namespace}}
    await api.create(
        SECRETS, {"apiVersion": "v1", "kind": "Secret", **keys, "stringData": {"k": "x" * 32}}
    )
    quota = {"metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": {"secrets": "1"}}}
    await api.create(QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})

    async def counted() -> bool:
        return "hard" in (await api.get(QUOTAS, "q", namespace)).get("status", {})

    await until(counted)
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=0))
    await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}, replicas=1))

    async def is_refused() -> bool:
        sets = await operator.figure(OPERATOR_RECONCILES, 'loop="set",result="refused"')
        pool = await api.get(DECODE_POOLS, "d", namespace)
        return sets >= 3 and condition(pool, "RouterReady").get("reason") == "QuotaExceeded"

    await until(is_refused, operator)
    assert await count(api, namespace, 0)
    await api.delete(QUOTAS, "q", namespace)
    await until(lambda: count(api, namespace, 1), operator)


async def test_failed_and_lost_pods_are_replaced_and_orphans_adopted(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2))
    await until(lambda: count(api, namespace, 2), operator)
    first, second = await operating.pods(api, namespace)

    await api.delete(PODS, first["metadata"]["name"], namespace)
    await until(lambda: replaced(api, namespace, first), operator)

    ended = {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}
    await operating.set_status(api, namespace, second["metadata"]["name"], ended)
    await until(lambda: replaced(api, namespace, second), operator)

    orphan = (await operating.pods(api, namespace))[0]["metadata"]
    owners = orphan["ownerReferences"]
    await api.patch(PODS, orphan["name"], {"metadata": {"ownerReferences": None}}, namespace)

    async def adopted() -> bool:
        metadata = (await api.get(PODS, orphan["name"], namespace))["metadata"]
        return metadata["uid"] == orphan["uid"] and metadata.get("ownerReferences") == owners

    await until(adopted, operator)


async def test_a_pod_without_its_label_is_missing_until_the_label_returns(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    await api.create(PREFILL_POOLS, prefill("p", namespace))
    await until(lambda: count(api, namespace, 1), operator)
    [name] = await operating.names(api, namespace)
    await api.patch(PODS, name, {"metadata": {"labels": {labels.POOL: None}}}, namespace)

    async def taken() -> bool:
        pool = await api.get(PREFILL_POOLS, "p", namespace)
        return condition(pool, "PodsReady").get("reason") == "NameTaken"

    await until(taken, operator)
    await api.patch(PODS, name, {"metadata": {"labels": {labels.POOL: "p"}}}, namespace)

    async def counted() -> bool:
        pool = await api.get(PREFILL_POOLS, "p", namespace)
        return pool["status"]["replicas"] == 1 and not await taken()

    await until(counted, operator)


async def test_a_quota_error_is_in_the_status_until_the_quota_is_lifted(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    quota = {"metadata": {"name": "q", "namespace": namespace}, "spec": {"hard": {"pods": "1"}}}
    await api.create(QUOTAS, {"apiVersion": "v1", "kind": "ResourceQuota", **quota})

    async def counted() -> bool:
        return "hard" in (await api.get(QUOTAS, "q", namespace)).get("status", {})

    await until(counted)
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=3))

    async def has_message(text: str) -> bool:
        pool = await api.get(PREFILL_POOLS, "p", namespace)
        return any(
            text in condition["message"]
            for condition in pool.get("status", {}).get("conditions", ())
        )

    await until(lambda: has_message("exceeded quota"), operator)
    await api.delete(QUOTAS, "q", namespace)
    await until(lambda: count(api, namespace, 3), operator)


async def test_a_denied_admission_stalls_only_its_own_set(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    enforce = {"pod-security.kubernetes.io/enforce": "baseline"}
    await api.patch(NAMESPACES, namespace, {"metadata": {"labels": enforce}})
    refused = prefill("refused", namespace, template={"spec": {"hostNetwork": True}})
    await api.create(PREFILL_POOLS, refused)
    unpaired = decode("lonely", namespace, prefillRef={"name": "missing"})
    await api.create(DECODE_POOLS, unpaired)

    async def has_message(resource: Resource, name: str, text: str) -> bool:
        pool = await api.get(resource, name, namespace)
        return any(
            text in condition["message"]
            for condition in pool.get("status", {}).get("conditions", ())
        )

    await until(lambda: has_message(PREFILL_POOLS, "refused", "violates PodSecurity"), operator)
    await until(lambda: has_message(DECODE_POOLS, "lonely", "no PrefillPool missing"), operator)
    await api.create(PREFILL_POOLS, prefill("fine", namespace))
    await until(lambda: count(api, namespace, 1), operator)


async def test_a_refused_template_removes_no_serving_pod(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    one_by_one = {"maxSurge": 0, "maxUnavailable": 1, "progressDeadline": "1s"}
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2, rollout=one_by_one))

    async def is_stalled(text: str) -> bool:
        stalled = condition(await api.get(PREFILL_POOLS, "p", namespace), "Stalled")
        return stalled.get("status") == "True" and text in stalled["message"]

    async def complete() -> bool:
        pool = await api.get(PREFILL_POOLS, "p", namespace)
        return condition(pool, "Progressing").get("reason") == "Complete"

    async with kubelet(api, namespace):
        await until(complete, operator)
        serving = [pod["metadata"]["uid"] for pod in await operating.pods(api, namespace)]
        template = {"spec": {"priorityClassName": "missing"}}
        await api.patch(PREFILL_POOLS, "p", {"spec": {"template": template}}, namespace)
        await until(lambda: is_stalled("no PriorityClass with name missing"), operator)

        pool = await api.get(PREFILL_POOLS, "p", namespace)
        assert condition(pool, "Ready")["status"] == "True"
        assert condition(pool, "Progressing")["reason"] == "Held"
        assert len(await named(api, CONTROLLER_REVISIONS, namespace)) == 1
        remaining = await operating.pods(api, namespace)
        assert [pod["metadata"]["uid"] for pod in remaining] == serving

        await api.delete(PODS, remaining[0]["metadata"]["name"], namespace)
        await until(lambda: replaced(api, namespace, remaining[0]), operator)

        await api.patch(PREFILL_POOLS, "p", {"spec": {"template": None}}, namespace)
        await until(complete, operator)


async def test_an_invalid_edit_leaves_the_pool_replaced_and_scaled(
    api: Api, operator: operating.Operator, namespace: str
) -> None:
    # vLLM without RDMA devices: the schema admits it, the operator refuses it.
    spec: dict[str, Any] = {"engine": {"type": "vllm"}, "model": {"name": "org/model"}}
    await api.create(PREFILL_POOLS, prefill("p", namespace, replicas=2, **spec))
    await until(lambda: count(api, namespace, 2), operator)
    first, _ = await operating.pods(api, namespace)
    invalid = {"transfer": {"requireRdma": True}}
    await api.patch(PREFILL_POOLS, "p", {"spec": invalid}, namespace)

    async def is_invalid() -> bool:
        pool = await api.get(PREFILL_POOLS, "p", namespace)
        return condition(pool, "Stalled").get("reason") == "InvalidSpec"

    await until(is_invalid, operator)
    await api.delete(PODS, first["metadata"]["name"], namespace)
    await until(lambda: replaced(api, namespace, first), operator)
    await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 3}}, namespace)
    await until(lambda: count(api, namespace, 3), operator)
    await api.patch(PREFILL_POOLS, "p", {"spec": {"replicas": 1}}, namespace)
    await until(lambda: count(api, namespace, 1), operator)
    assert len(await named(api, CONTROLLER_REVISIONS, namespace)) == 1


async def count(api: Api, namespace: str, expected: int) -> bool:
    return len(await operating.pods(api, namespace)) == expected


async def replaced(api: Api, namespace: str, pod: Object) -> bool:
    """Whether there are two pods again, without this one."""
    uids = {item["metadata"]["uid"] for item in await operating.pods(api, namespace)}
    return len(uids) == 2 and pod["metadata"]["uid"] not in uids


async def named(api: Api, resource: Resource, namespace: str) -> list[str]:
    return sorted(item["metadata"]["name"] for item in (await api.list(resource, namespace)).items)


async def empty(api: Api, resource: Resource, namespace: str) -> bool:
    return not (await api.list(resource, namespace)).items
