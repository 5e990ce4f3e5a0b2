"""What a pool's status is made from: one pool beside what it pairs with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..conditions import Reason
from ..crd import DECODE_POOL, PREFILL_POOL
from ..observed import (
    Failure,
    NodeState,
    Observed,
    PodState,
    PoolResource,
    RouterState,
)
from . import pod_plan, progress
from .actions import Mode, PoolPlan, SetPlan
from .fit import misfit
from .rollout import Limits, limits


@dataclass(frozen=True)
class Facts:
    """One pool of a set that is not being deleted."""

    now: float
    resource: PoolResource
    plan: PoolPlan
    pods: tuple[PodState, ...]
    peers: tuple[PodState, ...]
    """Ready pods of the other side."""
    prefill: PoolPlan | None
    """Of a DecodePool: its PrefillPool's."""
    decodes: tuple[PoolPlan, ...]
    """Of a PrefillPool: those that name it."""
    nodes: tuple[NodeState, ...] | None
    router: RouterState | None
    endpoint: str | None
    """Name of the endpoint that a DecodePool serves behind."""
    moved: float
    """KV bytes, where anybody looked."""
    failure: Failure | None

    @property
    def is_prefill(self) -> bool:
        return self.resource.key.kind == PREFILL_POOL

    @property
    def pairs(self) -> bool:
        """Whether it is a DecodePool that names a PrefillPool."""
        spec = self.resource.body.get("spec")
        return not self.is_prefill and isinstance(spec, Mapping) and bool(spec.get("prefillRef"))

    @property
    def desired(self) -> int:
        """Pods wanted; of a pool that says none readably, those there are."""
        return len(self.active) if self.plan.desired is None else self.plan.desired

    @property
    def limits(self) -> Limits | None:
        pool = self.plan.pool
        return limits(pool.spec.rollout, self.desired) if pool else None

    @cached_property
    def active(self) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.pods if pod.active)

    @cached_property
    def counting(self) -> tuple[PodState, ...]:
        return pod_plan.counting(self.pods, self.now)

    @cached_property
    def ready(self) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.active if pod.ready)

    @cached_property
    def leaving(self) -> tuple[PodState, ...]:
        return tuple(pod for pod in self.pods if pod.leaving and not pod.over)

    @cached_property
    def paired(self) -> tuple[PodState, ...]:
        hashes = {pod.compat for pod in self.peers}
        return tuple(pod for pod in self.ready if pod.compat in hashes)

    @cached_property
    def progress(self) -> Reason:
        return progress.reason(self.resource, self.plan, self.counting, self.now)

    @property
    def rolling(self) -> bool:
        return self.plan.mode is Mode.ROLL and any(
            pod.revision != self.plan.update for pod in self.active
        )

    @cached_property
    def misfit(self) -> str | None:
        """Why no node can take a pod; asked only when one waits for a node."""
        template = self.plan.template
        waiting = [pod for pod in self.active if not pod.scheduled]
        short = len(self.active) < self.desired or waiting
        if self.nodes is None or template is None or not short:
            return None
        if any(pod.scheduled and pod.revision == self.plan.update for pod in self.pods):
            return None
        return misfit(template["spec"], self.nodes)

    def before(self, kind: str) -> Mapping[str, Any]:
        """A condition as it was last written."""
        return progress.condition(self.resource.status, kind)


def facts(observed: Observed, plan: SetPlan) -> list[Facts]:
    """Of every pool that the plan speaks of."""
    resources = [*([observed.prefill] if observed.prefill else []), *observed.decodes]
    known = [one for one in resources if one.key in plan.pools]
    pods = {one.key: pod_plan.own_pods(observed, one) for one in known}
    prefill = next((p for key, p in plan.pools.items() if key.kind == PREFILL_POOL), None)
    decodes = tuple(p for key, p in plan.pools.items() if key.kind == DECODE_POOL)
    return [
        Facts(
            now=observed.now,
            resource=one,
            plan=plan.pools[one.key],
            pods=pods[one.key],
            peers=tuple(
                pod
                for key, those in pods.items()
                if key.kind != one.key.kind
                for pod in those
                if pod.active and pod.ready
            ),
            prefill=prefill if one.key.kind == DECODE_POOL else None,
            decodes=decodes if one.key.kind == PREFILL_POOL else (),
            nodes=observed.nodes,
            router=_router(observed, one),
            endpoint=None if one.key.kind == PREFILL_POOL else pod_plan.endpoint_name(one),
            moved=observed.transports.get(one.key.name, 0.0),
            failure=observed.failures.get(one.key),
        )
        for one in known
    ]


def _router(observed: Observed, resource: PoolResource) -> RouterState | None:
    if resource.key.kind == PREFILL_POOL:
        return None
    return observed.routers.get(pod_plan.endpoint_name(resource))
