"""A routing endpoint as values: what is seen of it, what is set for all, what is to be done. Pure.

ObservedEndpoint, RouterSettings ─► router.plan_endpoint ─► EndpointPlan
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..observed import Body, EndpointKey, Failure
from ..resources.pools import DecodePool
from ..resources.resolve import own_version

ApiKind = tuple[str, str]
"""apiVersion and kind."""

CHILD_KINDS: Final[tuple[ApiKind, ...]] = (
    ("v1", "Service"),
    ("v1", "ConfigMap"),
    ("v1", "Secret"),
    ("v1", "ServiceAccount"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("apps/v1", "Deployment"),
    ("policy/v1", "PodDisruptionBudget"),
)
"""What every cluster has."""

INFERENCE_POOL: Final[ApiKind] = ("inference.networking.k8s.io/v1", "InferencePool")
INFERENCE_POOL_ALPHA: Final[ApiKind] = ("inference.networking.x-k8s.io/v1alpha2", "InferencePool")
HTTP_ROUTE: Final[ApiKind] = ("gateway.networking.k8s.io/v1", "HTTPRoute")

OPTIONAL_KINDS: Final[tuple[ApiKind, ...]] = (INFERENCE_POOL, INFERENCE_POOL_ALPHA, HTTP_ROUTE)
"""What discovery is asked for; where both InferencePools exist the first is written."""


@dataclass(frozen=True)
class Ref:
    """One object of a namespace."""

    api_version: str
    kind: str
    name: str


@dataclass(frozen=True)
class EndpointPool:
    """A DecodePool that names the endpoint."""

    uid: str
    pool: DecodePool

    @property
    def name(self) -> str:
        return self.pool.name


@dataclass(frozen=True)
class UnreadPool:
    """A DecodePool that names the endpoint and cannot be read: it owns, and decides nothing."""

    uid: str
    name: str


@dataclass(frozen=True)
class ObservedEndpoint:
    """One endpoint, everything about it, at one moment."""

    key: EndpointKey
    now: float
    """Unix seconds."""
    pools: tuple[EndpointPool, ...]
    """Those that can be read and are not being deleted."""
    unread: tuple[UnreadPool, ...] = ()
    """As long as there is one, nothing is deleted: it may be what the object is for."""
    children: Mapping[Ref, Body] = field(default_factory=dict, repr=False)
    """Objects of `CHILD_KINDS` and `kinds` in the namespace whose label `labels.ENDPOINT` is the
    endpoint's name, as the API server holds them."""
    kinds: frozenset[ApiKind] = frozenset()
    """Those of `OPTIONAL_KINDS` that the cluster has."""
    secret: bytes = field(default=b"", repr=False)
    """32 random bytes, new in each pass: the plan key to add, should one be due."""
    failures: Mapping[Ref, Failure] = field(default_factory=dict)
    """Of the last apply: writes the API server refused, until they succeed."""


@dataclass(frozen=True)
class EndpointPlan:
    """What to write, in this order, and when to look again without being told."""

    apply: tuple[Body, ...] = ()
    """Objects to create or to bring to this content; those that `covers` are left out.

    One that is not among the observed children is created and never overwritten: where its name is
    taken, the index trails (new plan keys would void those that pods have), or it is another's."""
    delete: tuple[Ref, ...] = ()
    requeue_after: float | None = None
    """Seconds until a plan key is due; None: nothing is."""


@dataclass(frozen=True)
class RouterSettings:
    """What is the same for every endpoint; the operator's flags and the chart's values."""

    tandem_image: str = field(default_factory=lambda: f"tandem:{own_version()}")
    """Of the EPP, and of what drains Envoy."""
    envoy_image: str = "envoyproxy/envoy:distroless-v1.40.0"
    """Upstream's; the configuration is tested with this version."""
    image_pull_policy: str | None = None
    """None is Kubernetes' own choice, which follows from the tag."""
    image_pull_secrets: tuple[str, ...] = ()
    envoy_threads: int = 4
    """Its workers; left to itself it starts one for each core of the node."""
    envoy_replicas: int = 2
    """Two, so that a node's loss is no outage."""
    epp_replicas: int = 1
    """Where no pool says. One knows all requests in flight; while it restarts, Envoy balances
    plainly."""
    envoy_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        }
    )
    """Request bodies of up to 16 MiB are held while their pod is chosen."""
    epp_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "250m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        }
    )
    """No limit on CPU: a throttled pick is a slower first token."""
    key_period: float = 24 * 3600.0
    """Seconds a plan key signs. Shorter than an hour is all mounts and no gain."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Body, ...] = ()
    priority_class: str | None = None
