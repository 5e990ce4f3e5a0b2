"""A simulated cluster with one set, for tests.

It holds the objects, applies a plan write by write, and changes pods as kubelets and nodes would.
Bodies go through the same parsing as those of the API server.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from tandem_contract.labels import SIDECAR_FLAGS, STORAGE_BOUNDS
from tandem_operator.observed import (
    Failure,
    NodeState,
    Observed,
    PodState,
    PoolKey,
    PullPod,
    RouterState,
    StorageReport,
)
from tandem_operator.planning import api_objects
from tandem_operator.planning.actions import ApplyReplicas, SetPlan
from tandem_operator.planning.plan import plan_set
from tandem_operator.planning.rollout import MIN_READY_SECONDS
from tandem_operator.planning.status import Event, status_events, statuses
from tandem_operator.resources.resolve import Defaults
from tandem_operator.resources.schema import defaulted

from .pool_yaml import DECODE, PREFILL

START = 1_800_000_000.0
NAMESPACE = "default"
_UIDS = itertools.count()
"""Never the same UID twice, also not in another cluster: validations are cached by UID."""


class SimulatedCluster:
    """`pools` are the custom resources as users write them."""

    def __init__(self, *pools: dict[str, Any], defaults: Defaults | None = None) -> None:
        self.now = START
        self.defaults = defaults or Defaults(vllm_version="0.32.0")
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, PodState] = {}
        self.bodies: dict[str, dict[str, Any]] = {}
        """Pods as they were created, by name."""
        self.revisions: dict[str, dict[str, Any]] = {}
        self.budgets: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pull_pods: list[PullPod] = []
        self.nodes: tuple[NodeState, ...] | None = None
        self.routers: dict[str, RouterState] = {}
        self.failures: dict[PoolKey, Failure] = {}
        self.kv_bytes_moved: dict[PoolKey, float] = {}
        self.storage: dict[PoolKey, StorageReport] = {}
        self.events: list[Event] = []
        self.status_writes = 0
        for pool in pools or (PREFILL, DECODE):
            self.apply_pool(pool)

    def apply_pool(self, pool: dict[str, Any]) -> None:
        """`kubectl apply`."""
        body = defaulted(pool["kind"], copy.deepcopy(pool))
        body["metadata"]["namespace"] = NAMESPACE
        key = (body["kind"], body["metadata"]["name"])
        old = self.objects.get(key)
        uid = old["metadata"]["uid"] if old else self._uid()
        generation = old["metadata"]["generation"] + (old["spec"] != body["spec"]) if old else 1
        body["metadata"] |= {
            "uid": uid,
            "generation": generation,
            "creationTimestamp": api_objects.rfc3339(self.now),
        }
        body["status"] = old.get("status", {}) if old else {}
        self.objects[key] = body

    def edit(self, kind: str, name: str, **spec: Any) -> None:
        """Change fields of a spec; None removes a field."""
        body = copy.deepcopy(self.objects[kind, name])
        body["spec"] = {k: v for k, v in {**body["spec"], **spec}.items() if v is not None}
        self.apply_pool(body)

    def annotate(self, kind: str, name: str, **annotations: str) -> None:
        body = copy.deepcopy(self.objects[kind, name])
        body["metadata"]["annotations"] = annotations
        self.apply_pool(body)

    def status(self, name: str, kind: str = "DecodePool") -> dict[str, Any]:
        status: dict[str, Any] = self.objects[kind, name]["status"]
        return status

    def condition(self, name: str, condition_type: str, kind: str = "DecodePool") -> dict[str, Any]:
        return next(c for c in self.status(name, kind)["conditions"] if c["type"] == condition_type)

    def observe(self) -> Observed:
        resources = [api_objects.pool_resource(body) for body in self.objects.values()]
        keys = {api_objects.set_key(body) for body in self.objects.values()}
        assert len(keys) == 1, keys
        return Observed(
            key=keys.pop(),
            now=self.now,
            prefill=next((r for r in resources if r.key.kind == "PrefillPool"), None),
            decodes=tuple(r for r in resources if r.key.kind == "DecodePool"),
            pods=tuple(self.pods.values()),
            revisions=tuple(api_objects.revision_state(body) for body in self.revisions.values()),
            budgets=tuple(self.budgets.values()),
            pull_jobs=tuple(api_objects.pull_job(body) for body in self.jobs.values()),
            pull_pods=tuple(self.pull_pods),
            nodes=self.nodes,
            routers=self.routers,
            kv_bytes_moved=self.kv_bytes_moved,
            storage=self.storage,
            failures=self.failures,
        )

    def plan(self) -> SetPlan:
        return plan_set(self.observe(), self.defaults)

    def reconcile(self, *, writes: int | None = None) -> SetPlan:
        """One pass; with `writes`, the operator dies after that many writes."""
        observed = self.observe()
        plan = plan_set(observed, self.defaults)
        assert plan_set(observed, self.defaults) == plan, "equal input gave two different plans"
        for done, write in enumerate(self._writes(plan)):
            if writes is not None and done >= writes:
                return plan
            write()
        for key, body in statuses(observed, plan).items():
            held = self.objects[key.kind, key.name]
            if held["status"] != body:
                self.events += status_events(held["status"], body)
                held["status"] = copy.deepcopy(body)
                self.status_writes += 1
        return plan

    def settle(self, passes: int = 200) -> None:
        """Reconcile until nothing changes; in between, pods get ready and deleted ones vanish."""
        for _ in range(passes):
            writes = self.status_writes
            plan = self.reconcile()
            moved = self.kubelets()
            wait = plan.requeue_after
            if not plan.writes and not moved and writes == self.status_writes:
                # Pods become available without any change; a deadline is not waited for.
                if wait is None or wait > MIN_READY_SECONDS:
                    return
                self.now += wait
            self.now += 1
        raise AssertionError(f"still changing after {passes} passes: {plan}")

    def kubelets(self) -> bool:
        """Every pod becomes ready, or vanishes if it is being deleted. Whether any pod changed."""
        moved = False
        for pod in list(self.pods.values()):
            if pod.deleting:
                self.remove_pod(pod.name)
                moved = True
            elif pod.active and not pod.ready:
                self.make_ready(pod.name)
                moved = True
        return moved

    def make_ready(self, name: str) -> None:
        self._change(name, phase="Running", scheduled=True, ready=True, ready_since=self.now)

    def schedule(self, name: str) -> None:
        self._change(name, scheduled=True)

    def make_unready(self, name: str) -> None:
        self._change(name, ready=False, ready_since=None)

    def fail(self, name: str, trouble: str = "container engine: Error (exit code 1)") -> None:
        self._change(
            name, phase="Failed", ready=False, ready_since=None, ended=self.now, trouble=trouble
        )

    def remove_pod(self, name: str) -> None:
        del self.pods[name], self.bodies[name]

    def of(self, pool: str, **attributes: Any) -> list[PodState]:
        """Pods of a pool with these attributes, sorted by name."""
        return sorted(
            (
                pod
                for pod in self.pods.values()
                if pod.pool == pool and all(getattr(pod, k) == v for k, v in attributes.items())
            ),
            key=lambda pod: pod.name,
        )

    def _writes(self, plan: SetPlan) -> Iterator[Any]:
        actions: list[tuple[Iterable[Any], Callable[[Any], Any]]] = [
            (plan.adopt, lambda write: self._adopt(write.kind, write.name, write.owner["uid"])),
            (plan.create_jobs, lambda write: self._create_job(write.body)),
            (plan.create_revisions, lambda write: self._create_revision(write.body)),
            (plan.apply_budgets, lambda write: self.budgets.update({write.name: write.body})),
            (
                plan.label_pods,
                lambda write: self._label(write.name, write.labels, write.annotations),
            ),
            (plan.create_pods, lambda write: self._create_pod(write.body)),
            (plan.delete_pods, lambda write: self._delete(write.name)),
            (plan.delete_budgets, self.budgets.pop),
            (plan.delete_revisions, self.revisions.pop),
            (plan.delete_jobs, lambda write: self.remove_job(write.name)),
            (plan.apply_replicas, self._apply_replicas),
        ]
        for writes, action in actions:
            for write in writes:
                yield partial(action, write)

    def _create_job(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        assert name not in self.jobs, f"{name} exists"
        self.jobs[name] = copy.deepcopy(body)
        self.jobs[name]["metadata"]["uid"] = self._uid()

    def remove_job(self, name: str) -> None:
        """Delete a Job with its pods."""
        uid = self.jobs.pop(name)["metadata"]["uid"]
        self.pull_pods = [pod for pod in self.pull_pods if pod.owner != uid]

    def _apply_replicas(self, write: ApplyReplicas) -> None:
        """Server-side apply. The operator is taken for the field's only owner."""
        body = copy.deepcopy(self.objects[write.pool.kind, write.pool.name])
        assert body["metadata"]["uid"] == write.uid
        body["spec"].pop("replicas", None)
        body["spec"] |= write.body["spec"]
        owned = {"f:spec": {"f:replicas": {}}} if write.body["spec"] else {}
        body["metadata"]["managedFields"] = [
            {"manager": api_objects.FIELD_MANAGER, "operation": "Apply", "fieldsV1": owned}
        ]
        self.apply_pool(body)

    def _create_pod(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        assert name not in self.pods, f"{name} exists"
        pod = copy.deepcopy(body)
        pod["metadata"] |= {"uid": self._uid(), "creationTimestamp": api_objects.rfc3339(self.now)}
        self.bodies[name] = pod
        self.pods[name] = api_objects.pod_state(pod)

    def _create_revision(self, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        assert name not in self.revisions, f"{name} exists"
        revision = copy.deepcopy(body)
        revision["metadata"] |= {
            "uid": self._uid(),
            "creationTimestamp": api_objects.rfc3339(self.now),
        }
        self.revisions[name] = revision

    def _adopt(self, kind: str, name: str, uid: str) -> None:
        if kind == "Pod":
            self._change(name, owner=uid)
        else:
            self.revisions[name]["metadata"]["ownerReferences"] = [{"uid": uid, "controller": True}]

    def _label(
        self,
        name: str,
        labels: dict[str, str | None],
        annotations: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        pod = self.pods[name]
        changed = {k: v for k, v in {**pod.labels, **labels}.items() if v is not None}
        self._change(name, labels=changed, draining="tandem.dev/draining" in changed)
        if SIDECAR_FLAGS in annotations:
            self._change(name, sidecar_flags=annotations[SIDECAR_FLAGS])
        if STORAGE_BOUNDS in annotations:
            self._change(name, storage_bounds=annotations[STORAGE_BOUNDS])

    def _delete(self, name: str) -> None:
        pod = self.pods[name]
        if not pod.scheduled or pod.over:
            self.remove_pod(name)
        else:
            self._change(name, deleting=True, draining=False, ready=False, leaves_by=self.now + 135)

    def _change(self, name: str, **changes: Any) -> None:
        self.pods[name] = replace(self.pods[name], **changes)

    def _uid(self) -> str:
        return f"uid-{next(_UIDS)}"


def named(pool: dict[str, Any], name: str, **spec: Any) -> dict[str, Any]:
    """A pool under another name, with these spec fields beside its own."""
    copied = copy.deepcopy(pool)
    copied["metadata"]["name"] = name
    copied["spec"] |= spec
    return copied


def settled(*pools: dict[str, Any]) -> SimulatedCluster:
    """A cluster in which nothing changes any more."""
    cluster = SimulatedCluster(*pools)
    cluster.settle()
    return cluster


def revisions(cluster: SimulatedCluster, pool: str) -> list[str]:
    return [pod.revision for pod in cluster.of(pool)]


UNIFIED = named(DECODE, "u", role="unified", model={"name": "org/model"})
del UNIFIED["spec"]["prefillRef"]
