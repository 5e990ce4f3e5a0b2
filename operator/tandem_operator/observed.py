"""The observed state of the cluster as frozen values: the input of planning. Pure.

`planning.api_objects` makes these from API objects, so that planning never handles untyped JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NewType

from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL
from tandem_contract.paths import Role

Body = Mapping[str, Any]
"""An API object as JSON."""
PodName = NewType("PodName", str)
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Kind = Literal["PrefillPool", "DecodePool"]

KINDS: Final[tuple[Kind, ...]] = (PREFILL_POOL, DECODE_POOL)


def roles_of(kind: Kind) -> tuple[str, ...]:
    """Values of the label `tandem.dev/role` on a pool's pods.

    A PrefillPool and a DecodePool may share a name; the role tells their pods apart.
    """
    if kind == PREFILL_POOL:
        return (Role.PREFILL.value,)
    return (Role.DECODE.value, Role.UNIFIED.value)


@dataclass(frozen=True, order=True)
class SetKey:
    """Identifies a set: a PrefillPool with the DecodePools that refer to it, or one DecodePool that
    refers to none.

    Namespace and name are those of the PrefillPool, or of the lone DecodePool; `kind` says which. A
    PrefillPool that does not exist but is referred to has a key as well: its DecodePools wait under
    it.
    """

    namespace: str
    name: str
    kind: Kind = "PrefillPool"


@dataclass(frozen=True, order=True)
class EndpointKey:
    """Identifies a routing endpoint: a Service, Envoy and EPP that DecodePools may share."""

    namespace: str
    name: str


@dataclass(frozen=True, order=True)
class PoolKey:
    """Identifies one PrefillPool or DecodePool."""

    namespace: str
    kind: Kind
    name: str


@dataclass(frozen=True)
class PoolResource:
    """A PrefillPool or DecodePool object as the API server has it."""

    key: PoolKey
    uid: str
    generation: int
    annotations: Mapping[str, str]
    created: float
    """Unix seconds."""
    body: Body = field(repr=False)
    """The whole object: `spec` as the user wrote it, with the schema's defaults; `status` as the
    operator last wrote it."""
    owns_replicas: bool = False
    """Whether the number in `spec.replicas` is the one that the operator wrote."""

    @property
    def status(self) -> Mapping[str, Any]:
        status = self.body.get("status")
        return status if isinstance(status, Mapping) else {}

    @property
    def without_status(self) -> Body:
        """What others than the operator write."""
        return {name: value for name, value in self.body.items() if name != "status"}

    @property
    def routed(self) -> Body:
        """What an endpoint may read: no status, and not how many pods there are."""
        body = self.without_status
        spec, metadata = body.get("spec"), {**body.get("metadata", {}), "generation": None}
        if isinstance(spec, Mapping):
            spec = {name: value for name, value in spec.items() if name != "replicas"}
        return {**body, "spec": spec, "metadata": metadata}

    @property
    def deleting(self) -> bool:
        """Whether the object is being deleted. The garbage collector then deletes its pods, and the
        operator creates none."""
        return "deletionTimestamp" in self.body.get("metadata", {})


@dataclass(frozen=True)
class PodState:
    """The fields of a pod object that planning needs."""

    name: PodName
    uid: str
    pool: str
    """Label `tandem.dev/pool`."""
    role: str
    revision: str
    compat: str
    owner: str | None
    """UID of the owner that controls the pod; None for an orphan."""
    phase: Phase
    ready: bool
    scheduled: bool
    node: str | None
    deleting: bool
    draining: bool
    """Has the label `tandem.dev/draining` but is not being deleted yet."""
    created: float
    """Unix seconds."""
    address: str | None
    labels: Mapping[str, str] = field(repr=False)
    trouble: str | None = None
    """Why the pod does not run, in the cluster's words: unschedulable, image, crash, eviction."""
    ready_since: float | None = None
    """Unix seconds; None while not ready."""
    available: bool = False
    """Ready for the pool's `rollout.minReadySeconds` without a break. The pod alone does not tell:
    `pod_plan.own_pods` sets it."""
    ended: float | None = None
    """Unix seconds at which the last container terminated; None before."""
    leaves_by: float | None = None
    """Unix seconds at which the kubelet kills the containers; None unless `deleting`."""
    attempt: int = 0
    """Number of predecessors in a row that terminated soon after their start (annotation
    `tandem.dev/attempt`)."""

    sidecar_flags: str | None = None
    """Annotation `tandem.dev/sidecar-flags`."""
    storage_bounds: str | None = None
    """Annotation `tandem.dev/storage-bounds`."""

    @property
    def leaving(self) -> bool:
        """Whether the pod drains or is being deleted."""
        return self.deleting or self.draining

    @property
    def over(self) -> bool:
        """Whether the pod has terminated for good, or its node is lost: it must be replaced."""
        return self.phase in ("Succeeded", "Failed", "Unknown")

    @property
    def is_failing(self) -> bool:
        """Whether the pod has ended, or is not ready for a reason that the cluster reports."""
        return self.over or (not self.ready and self.trouble is not None)

    @property
    def state(self) -> str:
        """The pod's state in the operator's metrics."""
        if self.leaving:
            return "draining"
        if self.over:
            return "failed"
        return "ready" if self.ready else "pending"

    @property
    def active(self) -> bool:
        """Whether the pod counts towards `spec.replicas`: neither terminated nor leaving."""
        return not self.over and not self.leaving


@dataclass(frozen=True)
class RevisionState:
    """A ControllerRevision: one immutable rendered pod template of a pool."""

    name: str
    uid: str
    pool: str
    kind: Kind
    revision: str
    compat: str
    number: int
    """Increases with each new revision of the pool."""
    owner: str | None
    created: float
    template: Body = field(repr=False)
    """`{"metadata": {"labels", "annotations"}, "spec"}` of the pods."""


@dataclass(frozen=True)
class PullJob:
    """A Job that downloads a set's model."""

    name: str
    uid: str
    is_complete: bool
    failure: str | None
    """Why Kubernetes gave the Job up; None while it may succeed."""


@dataclass(frozen=True)
class PullReport:
    """The termination message of a container of a PullJob's pod that has succeeded."""

    bytes: int
    files: int
    commit: str | None = None


@dataclass(frozen=True)
class PullPod:
    """A pod of a PullJob."""

    name: str
    owner: str | None
    """UID of its Job."""
    created: float
    """Unix seconds."""
    is_done: bool
    """Whether every container has succeeded."""
    reports: Mapping[str, PullReport]
    """By container; those that have not succeeded are absent."""
    trouble: str | None
    """As in PodState."""


@dataclass(frozen=True)
class NodeState:
    """A node's size and taints, to detect that a replica fits on no node."""

    name: str
    allocatable: Mapping[str, str]
    """Resource name → quantity, as in the node's status."""
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class RouterState:
    """The result of an endpoint's reconciliation, for the DecodePools' condition RouterReady."""

    ready: bool
    reason: str
    message: str
    url: str | None


@dataclass(frozen=True)
class StorageReport:
    """What the engines of a pool say of their external store."""

    engines: int
    """Ready engines that have used the store, of those that were asked."""
    failing: tuple[PodName, ...] = ()
    """Those whose circuit breaker is not closed."""
    message: str = ""
    """The store's last failure as the first of them reports it; empty: it names none."""


@dataclass(frozen=True)
class Failure:
    """A write that the API server refused; kept until a later one succeeds."""

    reason: str
    """Reason of a condition, in CamelCase: QuotaExceeded, AdmissionDenied, …"""
    message: str
    """The API server's message."""


@dataclass(frozen=True)
class Observed:
    """One set and everything about it, at one moment."""

    key: SetKey
    now: float
    """Unix seconds."""
    prefill: PoolResource | None
    decodes: tuple[PoolResource, ...]
    pods: tuple[PodState, ...] = ()
    """Pods of all pools of the set, including leaving ones and orphans with the pools' labels."""
    revisions: tuple[RevisionState, ...] = ()
    budgets: tuple[Body, ...] = ()
    """PodDisruptionBudgets of the set's pools."""
    pull_jobs: tuple[PullJob, ...] = ()
    pull_pods: tuple[PullPod, ...] = ()
    nodes: tuple[NodeState, ...] | None = None
    """None when the operator may not list nodes: whether a replica fits is not checked then."""
    routers: Mapping[str, RouterState] = field(default_factory=dict)
    """By endpoint name."""
    kv_bytes_moved: Mapping[PoolKey, float] = field(default_factory=dict)
    """KV bytes that each DecodePool's engines have pulled; pools that have not been probed are
    absent."""
    storage: Mapping[PoolKey, StorageReport] = field(default_factory=dict)
    """Pools whose engines were not asked yet are absent."""
    failures: Mapping[PoolKey, Failure] = field(default_factory=dict)
    """Refused writes of the last apply."""
