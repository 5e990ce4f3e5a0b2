"""The plan of a set as frozen values: `plan.plan_set` returns it, `runtime.cluster` applies it.

The order of the fields of SetPlan is the order of the writes. If the process dies between any two
of them, the next plan continues from the state that is then in the cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tandem_contract import labels

from ..observed import Body, Failure, PodName, PoolKey, PullJob, SetKey
from ..resources.pools import Pool
from ..resources.spec import Rollout
from .validation import PoolValidation


@dataclass(frozen=True)
class Create:
    """An object to create, complete: a ControllerRevision, a Pod or a PodDisruptionBudget."""

    pool: PoolKey
    body: Body = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])


@dataclass(frozen=True)
class Adopt:
    """An orphan that gets an owner: a merge patch of `metadata` with `uid` as precondition."""

    pool: PoolKey
    kind: str
    """`Pod` or `ControllerRevision`."""
    name: str
    uid: str
    owner: Body = field(repr=False)
    """The ownerReference."""

    @property
    def patch(self) -> Body:
        """The merge patch."""
        return {"metadata": {"uid": self.uid, "ownerReferences": [self.owner]}}


@dataclass(frozen=True)
class Label:
    """Labels and annotations of a live pod to change: a merge patch with `uid` as precondition."""

    pool: PoolKey
    name: PodName
    uid: str
    labels: Mapping[str, str | None]
    """None removes."""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def patch(self) -> Body:
        """The merge patch."""
        changes = {"labels": dict(self.labels), "annotations": dict(self.annotations)}
        return {"metadata": {"uid": self.uid, **{k: v for k, v in changes.items() if v}}}


@dataclass(frozen=True)
class Delete:
    """A pod to delete, with `uid` as precondition; its own grace period lets it drain."""

    pool: PoolKey
    name: PodName
    uid: str
    reason: str
    """For the log: surplus, old revision, over, draining."""


@dataclass(frozen=True)
class ApplyReplicas:
    """`spec.replicas` of a pool whose user states neither it nor `scaling`, or its withdrawal."""

    pool: PoolKey
    uid: str
    replicas: int | None
    """None: the operator gives up the field, which removes it unless someone else owns it, too."""

    @property
    def body(self) -> dict[str, Any]:
        """What to apply (server-side); `uid` is a precondition."""
        spec = {} if self.replicas is None else {"replicas": self.replicas}
        return {
            "apiVersion": labels.API_VERSION,
            "kind": self.pool.kind,
            "metadata": {
                "name": self.pool.name, "namespace": self.pool.namespace, "uid": self.uid,
            },
            "spec": spec,
        }  # fmt: skip


@dataclass(frozen=True)
class Pull:
    """The download that a pool waits for before it rolls to a new revision."""

    job: str
    """Name of the Job."""
    message: str
    """What it does, or why it fails, in its own words."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `status.modelPull`; empty until the Job knows the model's size."""
    failure: Failure | None = None
    """Set while the Job does not get on."""
    has_pod: bool = True
    """False before the Job has one, which a quota or an admission rule may refuse for good."""


class Mode(Enum):
    """Which changes a pool's pods get in this pass."""

    ROLL = "roll"
    """Pods roll to the update revision, and scale."""
    HOLD = "hold"
    """Pods are replaced and scale but keep their revision: the pool is paused, waits for a peer, or
    its spec is rejected or cannot be read."""


@dataclass(frozen=True)
class PoolPlan:
    """Mode and revisions of one pool; `status` reports from it."""

    key: PoolKey
    generation: int
    """Generation of the spec that was planned. The cache may hold a newer one when the status is
    written."""
    validation: PoolValidation
    mode: Mode
    desired: int
    """Desired number of pods; the number of the last pass when the spec has no readable one."""
    current: str | None
    """The revision that served last by itself; None before any has."""
    update: str | None
    """The revision to roll to; equal to `current` when nothing changes, None when there is no
    revision yet."""
    compat: str | None
    """Compat hash of `update`."""
    blocked_by: tuple[str, ...] = ()
    """Reason of a HOLD: pools of the set that keep the old compat hash, and why each does."""
    refused: Failure | None = None
    """Reason of a HOLD: the API server refuses every pod of the spec; its message."""
    pull: Pull | None = None
    """Reason of a HOLD: the model is being downloaded."""
    newer_template: bool = False
    """Whether this operator would render the update revision differently than it is pinned."""
    template: Body | None = field(default=None, repr=False)
    """The pod template of `update`."""

    @property
    def pool(self) -> Pool | None:
        return self.validation.pool

    @property
    def rollout(self) -> Rollout:
        """The spec's section; empty for a pool that cannot be read."""
        return self.pool.spec.rollout if self.pool else Rollout()


@dataclass(frozen=True)
class SetPlan:
    """The writes of one pass over a set."""

    key: SetKey
    adopt: tuple[Adopt, ...] = ()
    create_jobs: tuple[Create, ...] = ()
    create_revisions: tuple[Create, ...] = ()
    apply_budgets: tuple[Create, ...] = ()
    """PodDisruptionBudgets to create or to bring to this content (server-side apply, forced)."""
    label_pods: tuple[Label, ...] = ()
    create_pods: tuple[Create, ...] = ()
    delete_pods: tuple[Delete, ...] = ()
    delete_budgets: tuple[str, ...] = ()
    delete_revisions: tuple[str, ...] = ()
    delete_jobs: tuple[PullJob, ...] = ()
    apply_replicas: tuple[ApplyReplicas, ...] = ()
    """Last, since a refusal must not keep a pool's pods from being replaced."""
    requeue_after: float | None = None
    """Seconds until the next pass is needed even if no object changes; None: never."""
    pools: Mapping[PoolKey, PoolPlan] = field(default_factory=dict)

    @property
    def touches_pods(self) -> bool:
        """Whether pods are created or deleted: the plan is then first computed again from a live
        list, because the cache may trail."""
        return bool(self.create_pods or self.delete_pods)

    @property
    def owners(self) -> tuple[PoolKey, ...]:
        """The pools that own the objects which this plan creates: the plan is then first computed
        again with these pools as they are now, because the cache may trail."""
        created = (self.create_jobs, self.create_revisions, self.apply_budgets, self.create_pods)
        return tuple(dict.fromkeys(create.pool for creates in created for create in creates))

    @property
    def writes(self) -> int:
        """Number of API calls; 0 when the set is as its spec says."""
        return sum(
            map(
                len,
                (self.adopt, self.create_jobs, self.create_revisions, self.apply_budgets,
                 self.label_pods, self.create_pods, self.delete_pods, self.delete_budgets,
                 self.delete_revisions, self.delete_jobs, self.apply_replicas),
            )
        )  # fmt: skip
