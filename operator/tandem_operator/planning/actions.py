"""What a set needs done, as frozen values: what `plan.plan_set` gives and `cluster.apply` does.

The order of the fields of SetPlan is the order of the writes. A process that dies between any two
of them leaves a state from which the next plan goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..observed import Body, Failure, PodName, PoolKey, SetKey
from ..resources.members import Pool
from .reading import Reading


@dataclass(frozen=True)
class Create:
    """An object to create: a ControllerRevision or a Pod, complete."""

    pool: PoolKey
    body: Body = field(repr=False)

    @property
    def name(self) -> str:
        return str(self.body["metadata"]["name"])


@dataclass(frozen=True)
class Adopt:
    """An orphan to give an owner: a merge patch of `metadata` with `uid` as precondition."""

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
    """Labels of a live pod to change: a merge patch with `uid` as precondition."""

    pool: PoolKey
    name: PodName
    uid: str
    labels: Mapping[str, str | None]
    """None removes."""

    @property
    def patch(self) -> Body:
        """The merge patch."""
        return {"metadata": {"uid": self.uid, "labels": dict(self.labels)}}


@dataclass(frozen=True)
class Delete:
    """A pod to delete, with `uid` as precondition; its own grace period lets it drain."""

    pool: PoolKey
    name: PodName
    uid: str
    reason: str
    """For the log: surplus, old revision, over, draining."""


class Mode(Enum):
    """How a pool's pods are brought to its spec."""

    ROLL = "roll"
    """To the update revision."""
    HOLD = "hold"
    """Pods stay of the revision they are of: paused, waiting for a peer, or in disagreement."""
    FREEZE = "freeze"
    """Nothing is touched: the spec cannot be read."""


@dataclass(frozen=True)
class PoolPlan:
    """What was read and decided of one pool; what its status is made from."""

    key: PoolKey
    reading: Reading
    mode: Mode
    desired: int | None
    """Pods wanted; None when the spec does not say so readably."""
    current: str | None
    """The revision that last served by itself; None before the first did."""
    update: str | None
    """The revision to come to: `current` again when nothing is to change. None when there is none
    yet."""
    compat: str | None
    """Compat hash of `update`."""
    laggards: tuple[str, ...] = ()
    """`HOLD` for their sake: pools of the set that do not come to the same compat hash, and why."""
    refused: Failure | None = None
    """`HOLD` because of it: the API server takes no pod of the pool's spec, in its own words."""
    newer_template: bool = False
    """Whether this operator would render the update revision otherwise than it is pinned."""
    template: Body | None = field(default=None, repr=False)
    """The pod template of `update`."""

    @property
    def pool(self) -> Pool | None:
        return self.reading.pool


@dataclass(frozen=True)
class SetPlan:
    """One pass over a set."""

    key: SetKey
    adopt: tuple[Adopt, ...] = ()
    create_revisions: tuple[Create, ...] = ()
    apply_budgets: tuple[Create, ...] = ()
    """PodDisruptionBudgets to create or to bring to this content (server-side apply, forced)."""
    label_pods: tuple[Label, ...] = ()
    create_pods: tuple[Create, ...] = ()
    delete_pods: tuple[Delete, ...] = ()
    delete_budgets: tuple[str, ...] = ()
    delete_revisions: tuple[str, ...] = ()
    requeue_after: float | None = None
    """Seconds until time alone changes what is to be done or said."""
    pools: Mapping[PoolKey, PoolPlan] = field(default_factory=dict)

    @property
    def touches_pods(self) -> bool:
        """Whether pods come or go: the plan is then made again from a live list first."""
        return bool(self.create_pods or self.delete_pods)

    @property
    def writes(self) -> int:
        """How many API calls it takes; 0 at rest."""
        return sum(
            map(
                len,
                (self.adopt, self.create_revisions, self.apply_budgets, self.label_pods,
                 self.create_pods, self.delete_pods, self.delete_budgets, self.delete_revisions),
            )
        )  # fmt: skip
