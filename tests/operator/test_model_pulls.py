"""`model.cache.prePull`: a set's Job, its progress and failures, and the commit of its pods."""

import json
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import PullPod, PullReport
from tandem_operator.planning.model_pulls import PARTS
from tandem_operator.resources.resolve import Defaults

from .pool_yaml import decode_pool, prefill_pool
from .simulated_cluster import SimulatedCluster, named

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "f" * 40
GB = 10**9


def cached(**cache: Any) -> dict[str, Any]:
    return {"name": "org/model", "cache": {"claimName": "hub", "prePull": True, **cache}}


def pulling(*pools: dict[str, Any]) -> SimulatedCluster:
    """A cluster whose set has asked for its Job."""
    cluster = SimulatedCluster(*(pools or (prefill_pool(model=cached()), decode_pool())))
    cluster.reconcile()
    return cluster


def job(cluster: SimulatedCluster) -> dict[str, Any]:
    (body,) = cluster.jobs.values()
    return body


def pod_of(cluster: SimulatedCluster, **fields: Any) -> None:
    """The Job's controller and the kubelet: the Job's newest pod, with these fields."""
    state: dict[str, Any] = {"is_done": False, "reports": {}, "trouble": None, **fields}
    uid, number = job(cluster)["metadata"]["uid"], len(cluster.pull_pods)
    pod = PullPod(name=f"pod-{number}", owner=uid, created=cluster.now + number, **state)
    cluster.pull_pods.append(pod)


def finish(cluster: SimulatedCluster, commit: str = COMMIT) -> None:
    """The Job succeeds."""
    reports = {"resolve": PullReport(bytes=GB, files=7, commit=commit)}
    pod_of(cluster, is_done=True, reports=reports)
    status = {"conditions": [{"type": "Complete", "status": "True"}]}
    job(cluster)["status"] = status


def arguments(cluster: SimulatedCluster, pool: str) -> str:
    """The engine's arguments in the newest revision of a pool."""
    bodies = [b for b in cluster.revisions.values() if b["metadata"]["labels"][labels.POOL] == pool]
    newest = max(bodies, key=lambda body: body["revision"])
    return " ".join(newest["data"]["spec"]["containers"][0]["args"])


def test_pods_start_after_the_download_at_its_commit() -> None:
    cluster = pulling()
    assert not cluster.revisions
    assert not cluster.pods
    assert cluster.condition("d", "Ready")["reason"] == "ModelPulls"
    finish(cluster)
    cluster.settle()
    assert not cluster.jobs
    for pool, kind in (("p", "PrefillPool"), ("d", "DecodePool")):
        assert f"--revision {COMMIT}" in arguments(cluster, pool)
        (note,) = {
            cluster.bodies[pod.name]["metadata"]["annotations"][labels.PULLED_MODEL]
            for pod in cluster.of(pool)
        }
        assert json.loads(note)["commit"] == COMMIT
        assert cluster.status(pool, kind)["modelPull"] == {"commit": COMMIT}
        # The commit is no change by this operator.
        assert cluster.condition(pool, "UpdateAvailable", kind)["status"] == "False"
    assert cluster.condition("d", "Progressing")["reason"] == "Complete"


def test_one_job_has_what_the_pools_pods_have() -> None:
    engine = {
        "env": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
        ],
        "envFrom": [{"secretRef": {"name": "proxy"}}],
    }
    accelerator = {
        "count": 1, "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }  # fmt: skip
    source = {"huggingface": {"tokenSecretRef": {"name": "hf", "key": "token"}}}
    pool = prefill_pool(
        model={**cached(), "source": source, "revision": "v1"}, engine=engine,
        accelerator=accelerator, imagePullSecrets=[{"name": "registry"}],
    )  # fmt: skip
    body = job(pulling(pool, decode_pool()))
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("PrefillPool", "p", True)
    assert body["spec"]["backoffLimit"] == 5
    spec = body["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == accelerator["nodeSelector"]
    assert spec["tolerations"] == accelerator["tolerations"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    containers = [*spec["initContainers"], *spec["containers"]]
    assert [c["name"] for c in containers] == ["resolve", *(f"part-{i}" for i in range(PARTS))]
    assert containers[0]["command"][-3:] == ["org/model", "v1", "5"]
    for container in containers:
        env = {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}
        assert env["HTTPS_PROXY"] == "http://proxy:3128"
        # Pods that load from the cache may be offline; the download is not.
        assert env["HF_HUB_OFFLINE"] == "0"
        assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
        assert env["HF_HUB_CACHE"] == "/model-cache"
        assert container["envFrom"] == engine["envFrom"]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_job_has_what_the_template_gives_pods_to_reach_the_hub() -> None:
    authority = {"name": "authority", "configMap": {"name": "authority"}}
    template = {
        "spec": {
            "serviceAccountName": "models",
            "priorityClassName": "high",
            "imagePullSecrets": [{"name": "registry"}],
            "tolerations": [{"operator": "Exists"}],
            "volumes": [authority],
            "hostNetwork": True,
            "containers": [
                {
                    "name": "engine",
                    "image": "of-the-engine",
                    "args": ["--flag"],
                    "env": [
                        {"name": "SSL_CERT_FILE", "value": "/authority/ca.crt"},
                        {"name": "HF_HUB_OFFLINE", "value": "1"},
                    ],
                    "volumeMounts": [{"name": "authority", "mountPath": "/authority"}],
                },
            ],
        }
    }
    pool = prefill_pool(model=cached(), template=template, imagePullSecrets=[{"name": "own"}])
    spec = job(pulling(pool, decode_pool()))["spec"]["template"]["spec"]
    assert (spec["serviceAccountName"], spec["priorityClassName"]) == ("models", "high")
    assert spec["imagePullSecrets"] == [{"name": "own"}, {"name": "registry"}]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert authority in spec["volumes"]
    assert "hostNetwork" not in spec
    for container in [*spec["initContainers"], *spec["containers"]]:
        env = {v["name"]: v.get("value") for v in container["env"]}
        assert env["SSL_CERT_FILE"] == "/authority/ca.crt"
        assert env["HF_HUB_OFFLINE"] == "0"
        assert {"name": "authority", "mountPath": "/authority"} in container["volumeMounts"]
        assert container["image"] != "of-the-engine"
        assert "args" not in container


def test_where_the_platform_assigns_users_the_job_names_none() -> None:
    defaults = Defaults(assigned_users=True, image_pull_secrets=("all",), pull_policy="Never")
    cluster = SimulatedCluster(prefill_pool(model=cached()), decode_pool(), defaults=defaults)
    cluster.reconcile()
    spec = job(cluster)["spec"]["template"]["spec"]
    assert "runAsUser" not in spec["securityContext"]
    assert spec["imagePullSecrets"] == [{"name": "all"}]
    assert spec["containers"][0]["imagePullPolicy"] == "Never"


def test_the_status_shows_the_progress() -> None:
    cluster = pulling()
    name = job(cluster)["metadata"]["name"]
    cluster.reconcile()
    assert "has no pod yet" in cluster.condition("d", "Ready")["message"]
    pod_of(cluster)
    cluster.reconcile()
    assert "asks the hub" in cluster.condition("d", "Ready")["message"]
    pod_of(
        cluster,
        reports={
            "resolve": PullReport(bytes=10 * GB, files=9, commit=COMMIT),
            "part-0": PullReport(bytes=3 * GB, files=1),
            "part-1": PullReport(bytes=2 * GB, files=4),
        },
    )
    cluster.reconcile()
    message = f"Job {name} downloads org/model: 5.0 of 10.0 GB, 5 of 9 files"
    assert message in cluster.condition("d", "Ready")["message"]
    progressing = cluster.condition("p", "Progressing", "PrefillPool")
    assert (progressing["status"], progressing["reason"]) == ("True", "ModelPulls")
    assert message in progressing["message"]
    assert cluster.status("d")["modelPull"] == {
        "job": name, "commit": COMMIT,
        "bytes": 5 * GB, "totalBytes": 10 * GB, "files": 5, "totalFiles": 9,
    }  # fmt: skip
    assert cluster.reconcile().writes == 0
    # However long it takes, a download that gets on does not stall.
    cluster.now += 24 * 3600
    cluster.reconcile()
    assert cluster.condition("d", "Stalled")["status"] == "False"


def test_a_failure_is_reported_in_the_jobs_words_with_the_fix() -> None:
    cluster = pulling()
    pod_of(cluster, trouble="container resolve: Error: org/model is gated: accept its terms")
    cluster.reconcile()
    ready = cluster.condition("d", "Ready")
    assert ready["reason"] == "ModelPullFails"
    assert "org/model is gated: accept its terms" in ready["message"]
    assert "given it up" not in ready["message"]
    name = job(cluster)["metadata"]["name"]
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    job(cluster)["status"] = {"conditions": [failed]}
    cluster.reconcile()
    message = cluster.condition("d", "Reconciling")["message"]
    assert "org/model is gated: accept its terms" in message
    assert f"kubectl delete job {name}" in message
    assert cluster.events[-1].type == "Warning"
    assert {event.reason for event in cluster.events} >= {"ModelPullFails"}
    assert cluster.condition("d", "Stalled")["status"] == "False"
    cluster.now += 3600
    cluster.reconcile()
    assert cluster.condition("d", "Stalled")["reason"] == "ModelPullFails"
    # Kubernetes deletes it 10 minutes after its end, or the user does: the next attempt.
    cluster.remove_job(name)
    cluster.reconcile()
    assert set(cluster.jobs) == {name}


def test_a_job_that_gets_no_pod_stalls_after_the_deadline() -> None:
    cluster = pulling()
    cluster.now += 3600
    cluster.reconcile()
    stalled = cluster.condition("d", "Stalled")
    assert stalled["status"] == "True"
    assert "has no pod yet" in stalled["message"]
    pod_of(cluster)
    cluster.reconcile()
    assert cluster.condition("d", "Stalled")["status"] == "False"


def test_present_pods_stay_while_a_new_model_is_downloaded() -> None:
    cluster = pulling()
    finish(cluster)
    cluster.settle()
    before = {pod.name for pod in cluster.pods.values()}
    cluster.edit("PrefillPool", "p", model={**cached(), "revision": "v2"})
    cluster.settle()
    assert {pod.name for pod in cluster.pods.values()} == before
    assert cluster.condition("d", "PodsReady")["status"] == "True"
    assert cluster.condition("d", "Progressing")["reason"] == "ModelPulls"
    # A lost pod is replaced, and the pool scales.
    cluster.edit("DecodePool", "d", replicas=3)
    cluster.remove_pod(cluster.of("d")[0].name)
    cluster.settle()
    assert len(cluster.of("d")) == 3
    finish(cluster, LATER)
    cluster.settle()
    assert f"--revision {LATER}" in arguments(cluster, "d")
    assert not {pod.name for pod in cluster.pods.values()} & before


def test_later_revisions_of_the_set_get_the_same_commit_without_a_job() -> None:
    cluster = pulling()
    finish(cluster)
    cluster.settle()
    cluster.edit("DecodePool", "d", engine={"maxNumSeqs": 3})
    cluster.settle()
    assert not cluster.jobs
    assert f"--revision {COMMIT}" in arguments(cluster, "d")
    second = named(decode_pool(), "d2")
    cluster.apply_pool(second)
    cluster.settle()
    assert f"--revision {COMMIT}" in arguments(cluster, "d2")


def test_another_claim_is_filled_with_the_commit_of_the_first() -> None:
    cluster = pulling()
    finish(cluster)
    cluster.settle()
    cluster.edit("PrefillPool", "p", model=cached(claimName="other"))
    cluster.reconcile()
    resolve = job(cluster)["spec"]["template"]["spec"]["initContainers"][0]
    assert resolve["command"][-2] == COMMIT


def test_two_claims_of_a_new_set_are_filled_one_after_the_other() -> None:
    cluster = pulling(prefill_pool(model=cached()), decode_pool(model=cached(claimName="other")))
    assert len(cluster.jobs) == 1
    finish(cluster)
    cluster.reconcile()
    cluster.reconcile()
    resolve = job(cluster)["spec"]["template"]["spec"]["initContainers"][0]
    assert resolve["command"][-2] == COMMIT
    cluster.pull_pods.clear()
    finish(cluster)
    cluster.settle()
    assert f"--revision {COMMIT}" in arguments(cluster, "d")


def test_turning_it_on_or_off_changes_no_pod() -> None:
    cluster = SimulatedCluster(prefill_pool(model=cached(prePull=False)), decode_pool())
    cluster.settle()
    for value in (True, False):
        cluster.edit("PrefillPool", "p", model=cached(prePull=value))
        assert cluster.reconcile().writes == 0
    assert not cluster.jobs


@pytest.mark.parametrize("change", ["env", "off"])
def test_a_job_that_is_no_longer_needed_is_deleted(change: str) -> None:
    cluster = pulling()
    (name,) = cluster.jobs
    if change == "env":
        engine = {"env": [{"name": "HF_ENDPOINT", "value": "http://mirror"}]}
        cluster.edit("PrefillPool", "p", engine=engine)
    else:
        cluster.edit("PrefillPool", "p", model=cached(prePull=False))
    cluster.reconcile()
    assert name not in cluster.jobs
    assert len(cluster.jobs) == (1 if change == "env" else 0)


def test_a_paused_pool_starts_no_job_and_keeps_the_one_it_has() -> None:
    cluster = pulling()
    (name,) = cluster.jobs
    for kind, pool in (("PrefillPool", "p"), ("DecodePool", "d")):
        cluster.edit(kind, pool, paused=True)
    cluster.reconcile()
    assert set(cluster.jobs) == {name}
    cluster.remove_job(name)
    cluster.reconcile()
    assert not cluster.jobs


def test_a_complete_job_without_its_pods_is_replaced() -> None:
    cluster = pulling()
    finish(cluster)
    cluster.pull_pods.clear()
    cluster.reconcile()
    assert not cluster.jobs
    cluster.reconcile()
    assert len(cluster.jobs) == 1


def test_an_operator_that_dies_after_any_write_continues() -> None:
    calm = pulling()
    finish(calm)
    calm.settle()
    # Job, two revisions, budget and three pods, and the Job's deletion.
    for writes in range(9):
        cluster = SimulatedCluster(prefill_pool(model=cached()), decode_pool())
        cluster.reconcile(writes=min(writes, 1))
        cluster.reconcile()
        finish(cluster)
        cluster.reconcile(writes=writes)
        cluster.settle()
        assert not cluster.jobs
        assert set(cluster.pods) == set(calm.pods)
        assert arguments(cluster, "p") == arguments(calm, "p")
