"""What the operator sees, as frozen values: the input of `plan` and `status`. Pure.

Bodies from the API server are parsed here, once; past this module there are only types.
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
    """Label `tandem.dev/role` of the pods of a pool: what tells two pools of one name apart."""
    if kind == PREFILL_POOL:
        return (Role.PREFILL.value,)
    return (Role.DECODE.value, Role.UNIFIED.value)


@dataclass(frozen=True, order=True)
class SetKey:
    """A set: the PrefillPool's namespace and name, or those of a DecodePool that stands alone.

    `kind` tells a lone DecodePool from a PrefillPool of the same name. A PrefillPool that is named
    by a DecodePool and does not exist has a key all the same: its decodes wait under it.
    """

    namespace: str
    name: str
    kind: Kind = "PrefillPool"


@dataclass(frozen=True, order=True)
class EndpointKey:
    """A routing endpoint: the Service, Envoy and EPP that pools of this name share."""

    namespace: str
    name: str


@dataclass(frozen=True, order=True)
class PoolKey:
    """One custom resource."""

    namespace: str
    kind: Kind
    name: str


@dataclass(frozen=True)
class PoolResource:
    """A pool's object as the API server holds it."""

    key: PoolKey
    uid: str
    generation: int
    annotations: Mapping[str, str]
    created: float
    """Unix seconds."""
    body: Body = field(repr=False)
    """The whole object; `spec` as the user wrote it with the schema's defaults, `status` as last
    written."""

    @property
    def status(self) -> Mapping[str, Any]:
        found = self.body.get("status")
        return found if isinstance(found, Mapping) else {}

    @property
    def deleting(self) -> bool:
        """It is on its way out: the garbage collector takes its pods, nothing new is made."""
        return "deletionTimestamp" in self.body.get("metadata", {})


@dataclass(frozen=True)
class PodState:
    """What a pod's object says that planning needs."""

    name: PodName
    uid: str
    pool: str
    """Label `tandem.dev/pool`."""
    role: str
    revision: str
    compat: str
    owner: str | None
    """UID of the controlling owner; None for an orphan."""
    phase: Phase
    ready: bool
    scheduled: bool
    node: str | None
    deleting: bool
    draining: bool
    """Label `tandem.dev/draining` without `deleting`: chosen to leave, not yet told to."""
    created: float
    """Unix seconds."""
    address: str | None
    labels: Mapping[str, str] = field(repr=False)
    trouble: str | None = None
    """The cluster's own words on why it does not run: unschedulable, image, crash, eviction."""
    ready_since: float | None = None
    """Unix seconds; None while not ready."""
    ended: float | None = None
    """Unix seconds at which its last container ended; None before."""
    leaves_by: float | None = None
    """Unix seconds at which the kubelet kills what still runs; None unless `deleting`."""
    attempt: int = 0
    """How many pods before this one ended soon after their start (annotation
    `tandem.dev/attempt`)."""

    @property
    def leaving(self) -> bool:
        return self.deleting or self.draining

    @property
    def over(self) -> bool:
        """It never comes back, its containers ended or its node forgotten: to be replaced."""
        return self.phase in ("Succeeded", "Failed", "Unknown")

    @property
    def active(self) -> bool:
        """Counts towards the replicas: neither over nor on its way out."""
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
    """Grows with each new one."""
    owner: str | None
    created: float
    template: Body = field(repr=False)
    """`{"metadata": {"labels", "annotations"}, "spec"}` of the pods."""


@dataclass(frozen=True)
class NodeState:
    """A node's size, for saying that a replica fits on none."""

    name: str
    allocatable: Mapping[str, str]
    """Resource → quantity, as written."""
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...] = ()
    unschedulable: bool = False


@dataclass(frozen=True)
class RouterState:
    """What the endpoint's loop knows, for the DecodePool's RouterReady."""

    ready: bool
    reason: str
    message: str
    url: str | None


@dataclass(frozen=True)
class Failure:
    """A write the API server refused, kept until one succeeds."""

    reason: str
    """CamelCase, a condition's reason: QuotaExceeded, AdmissionDenied, …"""
    message: str
    """The API's own."""


@dataclass(frozen=True)
class Observed:
    """One set, everything about it, at one moment."""

    key: SetKey
    now: float
    """Unix seconds."""
    prefill: PoolResource | None
    decodes: tuple[PoolResource, ...]
    pods: tuple[PodState, ...] = ()
    """Of all pools of the set, leaving ones and orphans with its labels included."""
    revisions: tuple[RevisionState, ...] = ()
    budgets: tuple[Body, ...] = ()
    """PodDisruptionBudgets of the set's pools."""
    nodes: tuple[NodeState, ...] | None = None
    """None when the operator may not read nodes: nothing is then said about fit."""
    routers: Mapping[str, RouterState] = field(default_factory=dict)
    """By endpoint name."""
    kv_bytes_moved: Mapping[str, float] = field(default_factory=dict)
    """KV bytes that each DecodePool's engines have pulled, by pool name; pools that have not been
    probed are absent."""
    failures: Mapping[PoolKey, Failure] = field(default_factory=dict)
    """Of the last apply."""
