"""One routing endpoint as frozen values: what the operator sees of it and what it will write. Pure.

ObservedEndpoint, RouterSettings ──► plan.plan_endpoint ──► EndpointPlan
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from ...observed import Body, EndpointKey, Failure
from ...resources.pools import DecodePool

ApiKind = tuple[str, str]
"""apiVersion and kind."""

NETWORK_POLICY: Final[ApiKind] = ("networking.k8s.io/v1", "NetworkPolicy")

CHILD_KINDS: Final[tuple[ApiKind, ...]] = (
    ("v1", "Service"),
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("apps/v1", "Deployment"),
    ("policy/v1", "PodDisruptionBudget"),
    NETWORK_POLICY,
)
"""Kinds of an endpoint's objects that every cluster has."""

INFERENCE_POOL: Final[ApiKind] = ("inference.networking.k8s.io/v1", "InferencePool")
INFERENCE_POOL_ALPHA: Final[ApiKind] = ("inference.networking.x-k8s.io/v1alpha2", "InferencePool")
HTTP_ROUTE: Final[ApiKind] = ("gateway.networking.k8s.io/v1", "HTTPRoute")

OPTIONAL_KINDS: Final[tuple[ApiKind, ...]] = (INFERENCE_POOL, INFERENCE_POOL_ALPHA, HTTP_ROUTE)
"""Kinds that the operator looks for with API discovery; where both versions of InferencePool exist
it writes the first."""


@dataclass(frozen=True)
class ObjectRef:
    """Identifies one object within a namespace."""

    api_version: str
    kind: str
    name: str

    @classmethod
    def of(cls, body: Body) -> Self:
        """The reference to an object, from its own `apiVersion`, `kind` and `metadata.name`."""
        return cls(body["apiVersion"], body["kind"], body["metadata"]["name"])


@dataclass(frozen=True)
class EndpointPool:
    """A DecodePool that names the endpoint."""

    uid: str
    pool: DecodePool

    @property
    def name(self) -> str:
        return self.pool.name


@dataclass(frozen=True)
class UnreadablePool:
    """A DecodePool that names the endpoint but has an invalid spec: it owns the endpoint's objects
    like the others, but its settings are unknown and do not count."""

    uid: str
    name: str


@dataclass(frozen=True)
class ObservedEndpoint:
    """One endpoint and everything about it, at one moment."""

    key: EndpointKey
    now: float
    """Unix seconds."""
    pools: tuple[EndpointPool, ...]
    """Pools that can be read and are not being deleted."""
    unreadable_pools: tuple[UnreadablePool, ...] = ()
    """While there is one, no object is deleted: the unreadable pool may need it."""
    children: Mapping[ObjectRef, Body] = field(default_factory=dict, repr=False)
    """Objects of `CHILD_KINDS` and `kinds` in the namespace whose label `labels.ENDPOINT` is the
    endpoint's name, as the API server holds them."""
    kinds: frozenset[ApiKind] = frozenset()
    """The `OPTIONAL_KINDS` that the cluster serves."""
    secret: bytes = field(default=b"", repr=False)
    """32 random bytes, new in each reconciliation: the plan key to add if one is due."""
    failures: Mapping[ObjectRef, Failure] = field(default_factory=dict)
    """Writes that the API server refused in the last apply."""


@dataclass(frozen=True)
class EndpointPlan:
    """The writes, in this order, and when to reconcile again without an event."""

    apply: tuple[Body, ...] = ()
    """Objects to create or update; objects that are already up to date are left out.

    An object that is not among the observed children is created but never overwritten. If its name
    is taken, either the cache is behind (and overwriting the plan keys would invalidate the ones
    that running pods hold), or the object belongs to someone else."""
    delete: tuple[ObjectRef, ...] = ()
    end: tuple[ObjectRef, ...] = ()
    """Deployments to delete, which stay until their pods have ended: what the pods use is deleted
    by a later plan."""
    notes: Mapping[str, str | None] = field(default_factory=dict)
    """By name of a Service: its annotation `labels.UNUSED_SINCE`; None removes it."""
    requeue_after: float | None = None
    """Seconds until the next plan key is added or dropped, what no pool needs is deleted, or the
    front that no client uses any more ends; None: nothing of it will be."""

    def creates(self, observed: ObservedEndpoint) -> bool:
        """Whether an object is created that was not among the observed children."""
        return any(ObjectRef.of(body) not in observed.children for body in self.apply)
