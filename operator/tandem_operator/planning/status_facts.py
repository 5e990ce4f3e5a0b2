"""The facts from which a pool's status is made: the pool beside its peers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL

from ..conditions import Reason
from ..observed import (
    Failure,
    NodeState,
    Observed,
    PodState,
    PoolResource,
    RouterState,
    StorageReport,
)
from . import pod_plan, progress
from .actions import Mode, PoolPlan, SetPlan
from .node_fit import no_fit_reason
from .progress import Progress
from .rollout import Limits, pool_limits


@dataclass(frozen=True)
class Facts:
    """One pool of a set that is not being deleted."""

    now: float
    """Unix seconds."""
    resource: PoolResource
    plan: PoolPlan
    pods: tuple[PodState, ...]
    peers: tuple[PodState, ...]
    """Ready pods of the other side."""
    prefill: PoolPlan | None
    """The plan of a DecodePool's PrefillPool; None for a PrefillPool or without one."""
    decodes: tuple[PoolPlan, ...]
    """The plans of the DecodePools that name a PrefillPool; empty for a DecodePool."""
    nodes: tuple[NodeState, ...] | None
    """None when the operator may not read nodes."""
    router: RouterState | None
    endpoint: str | None
    """Name of the endpoint that serves a DecodePool."""
    kv_bytes_moved: float
    """KV bytes that decode engines have read so far; 0 until an engine was probed."""
    storage: StorageReport | None
    """None until the pool's engines were asked."""
    failure: Failure | None
    """The write about this pool that the API server refused last, or why its model is not there."""

    @property
    def is_prefill(self) -> bool:
        return self.resource.key.kind == PREFILL_POOL

    @property
    def names_prefill(self) -> bool:
        """Whether the pool is a DecodePool with a `prefillRef`."""
        spec = self.resource.body.get("spec")
        return not self.is_prefill and isinstance(spec, Mapping) and bool(spec.get("prefillRef"))

    @property
    def desired(self) -> int:
        """Desired number of pods."""
        return self.plan.desired

    @property
    def limits(self) -> Limits | None:
        pool = self.plan.pool
        return pool_limits(pool, self.desired) if pool else None

    @cached_property
    def active_pods(self) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.pods if pod.active)

    @cached_property
    def counting_pods(self) -> tuple[PodState, ...]:
        """Active pods, and failed ones whose replacement is not due."""
        return pod_plan.counting(self.pods, self.now)

    @cached_property
    def ready_pods(self) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.active_pods if pod.ready)

    @cached_property
    def leaving_pods(self) -> tuple[PodState, ...]:
        """Pods that drain or terminate."""
        return tuple(pod for pod in self.pods if pod.leaving and not pod.over)

    @cached_property
    def paired_pods(self) -> tuple[PodState, ...]:
        """Ready pods for which the other side has a ready pod of the same compat hash."""
        hashes = {pod.compat for pod in self.peers}
        return tuple(pod for pod in self.ready_pods if pod.compat in hashes)

    @cached_property
    def progress(self) -> Reason:
        return progress.progressing_reason(self.resource, self.plan, self.counting_pods, self.now)

    @cached_property
    def last_progress(self) -> Progress | None:
        return progress.last_progress(
            self.resource, self.plan, self.counting_pods, self.now,
            is_refused=self.failure is not None,
        )  # fmt: skip

    @property
    def is_overdue(self) -> bool:
        """Whether the pool has made no progress for `rollout.progressDeadline`."""
        record = self.last_progress
        return record is not None and self.now >= record.time + progress.allowed_time(self.plan)

    @property
    def is_rolling(self) -> bool:
        return self.plan.mode is Mode.ROLL and any(
            pod.revision != self.plan.update for pod in self.active_pods
        )

    @cached_property
    def no_fit_reason(self) -> str | None:
        """Why a new pod fits on no node; None unless pods are missing or wait for a node."""
        template = self.plan.template
        unscheduled = [pod for pod in self.active_pods if not pod.scheduled]
        # Checked only when needed: the check visits every node.
        is_short = len(self.active_pods) < self.desired or unscheduled
        if self.nodes is None or template is None or not is_short:
            return None
        # A scheduled pod of this revision proves that the template fits.
        if any(pod.scheduled and pod.revision == self.plan.update for pod in self.pods):
            return None
        return no_fit_reason(template["spec"], self.nodes)

    def last_condition(self, kind: str) -> Mapping[str, Any]:
        """A condition as it was last written; empty when there is none."""
        return progress.condition(self.resource.status, kind)


def pool_facts(observed: Observed, plan: SetPlan) -> list[Facts]:
    """The facts of every pool that the plan covers."""
    resources = [*([observed.prefill] if observed.prefill else []), *observed.decodes]
    planned = [resource for resource in resources if resource.key in plan.pools]
    pods = {
        resource.key: pod_plan.own_pods(observed, resource, plan.pools[resource.key].rollout)
        for resource in planned
    }
    prefill = next((p for key, p in plan.pools.items() if key.kind == PREFILL_POOL), None)
    decodes = tuple(p for key, p in plan.pools.items() if key.kind == DECODE_POOL)
    return [
        Facts(
            now=observed.now,
            resource=resource,
            plan=plan.pools[resource.key],
            pods=pods[resource.key],
            peers=tuple(
                pod
                for key, pool_pods in pods.items()
                if key.kind != resource.key.kind
                for pod in pool_pods
                if pod.active and pod.ready
            ),
            prefill=prefill if resource.key.kind == DECODE_POOL else None,
            decodes=decodes if resource.key.kind == PREFILL_POOL else (),
            nodes=observed.nodes,
            router=_router(observed, resource),
            endpoint=_endpoint(resource),
            kv_bytes_moved=observed.kv_bytes_moved.get(resource.key, 0.0),
            storage=observed.storage.get(resource.key),
            failure=observed.failures.get(resource.key) or _pull_failure(plan, resource),
        )
        for resource in planned
    ]


def _pull_failure(plan: SetPlan, resource: PoolResource) -> Failure | None:
    pull = plan.pools[resource.key].pull
    return pull.failure if pull else None


def _endpoint(resource: PoolResource) -> str | None:
    return None if resource.key.kind == PREFILL_POOL else pod_plan.endpoint_name(resource)


def _router(observed: Observed, resource: PoolResource) -> RouterState | None:
    endpoint = _endpoint(resource)
    return None if endpoint is None else observed.routers.get(endpoint)
