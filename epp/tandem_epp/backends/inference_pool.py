"""What an InferencePool selects: pods by label, and their ports. Pure.

Read as `inference.networking.k8s.io/v1`, or in the older shape of
`inference.networking.x-k8s.io/v1alpha2`, whichever the object has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_kube.resources import INFERENCE_POOLS, Resource

GROUP: Final = INFERENCE_POOLS.group
_OLDER_GROUP: Final = "inference.networking.x-k8s.io"
_H2C: Final = "kubernetes.io/h2c"
"""Value of `appProtocol`: HTTP/2 without TLS. The other one is `http`, the default."""


@dataclass(frozen=True)
class PoolName:
    """How other objects refer to an InferencePool."""

    namespace: str
    name: str
    groups: tuple[str, ...] = (GROUP, _OLDER_GROUP)
    """The API groups of which they may say that the pool is."""

    def __str__(self) -> str:
        return f"InferencePool {self.namespace}/{self.name}"


@dataclass(frozen=True)
class PoolReference:
    """An InferencePool by name."""

    namespace: str
    name: str
    group: str = GROUP

    @property
    def resource(self) -> Resource:
        """The kind in the version that the EPP reads of this group."""
        version = "v1alpha2" if self.group == _OLDER_GROUP else INFERENCE_POOLS.version
        return Resource(f"{self.group}/{version}", INFERENCE_POOLS.plural)

    @property
    def full_name(self) -> PoolName:
        """How objects refer to this pool."""
        return PoolName(self.namespace, self.name, (self.group,))

    def __str__(self) -> str:
        return f"InferencePool {self.namespace}/{self.name} ({self.resource.api_version})"


@dataclass(frozen=True)
class PoolPods:
    """The pods of a pool."""

    selector: str
    """A Kubernetes label selector."""
    ports: tuple[int, ...]
    """At least one."""
    http2: bool = False
    """Whether they speak HTTP/2 without TLS, and no HTTP/1.1."""


@dataclass(frozen=True)
class InvalidPool:
    """A pool that cannot be served."""

    reason: str
    """The field, and what is wrong with it."""


def pool_pods(pool: Mapping[str, Any]) -> PoolPods | InvalidPool | None:
    """What `pool` selects; None while it is being deleted."""
    if "deletionTimestamp" in pool["metadata"]:
        return None
    spec = pool.get("spec") or {}
    selector = spec.get("selector") or {}
    # v1 has a LabelSelector, whose expressions its schema does not allow; v1alpha2 a plain map.
    labels = selector.get("matchLabels", {} if "targetPorts" in spec else selector)
    if not labels:
        return InvalidPool("spec.selector selects all pods of the namespace: name a label")
    listed = [port.get("number") for port in spec.get("targetPorts") or ()]
    ports = tuple(dict.fromkeys(listed or [spec.get("targetPortNumber")]))
    if not all(isinstance(port, int) and 1 <= port <= 65535 for port in ports):
        return InvalidPool("spec.targetPorts has no number of 1 to 65535")
    text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolPods(text, ports, http2=spec.get("appProtocol") == _H2C)
