"""Labels and annotations of Tandem's pods and objects: who writes them and who reads them.

Without a note, the operator writes the label, and EPPs and selectors read it.
"""

from typing import Final

GROUP: Final = "tandem.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"

POOL: Final = f"{GROUP}/pool"
ROLE: Final = f"{GROUP}/role"
MODEL: Final = f"{GROUP}/model"
REVISION: Final = f"{GROUP}/revision"
KV_COMPAT: Final = f"{GROUP}/kv-compat"
DRAINING: Final = f"{GROUP}/draining"

HANDOFF_PORTS: Final = f"{GROUP}/handoff-ports"
"""On pods whose engines take hand-off connections at known ports only: the side channel's first
port, and after an underscore the range of UCX's ports, as `5600_20000-20999`; `none` where KV moves
through a store alone. NetworkPolicies open those ports; to pods without the label, all unprivileged
ones. Operator → NetworkPolicies."""

LLMD_ROLE: Final = "llm-d.ai/role"
"""The same role under llm-d's label name, so that llm-d's EPP finds Tandem's pods."""

LLMD_ACTIVE_PORTS: Final = "llm-d.ai/active-ports"
"""Annotation of pods, as llm-d's EPP reads it: those of an InferencePool's target ports on which an
engine of this pod serves, with commas between them; default: all. User → EPP."""
GAIE_ACTIVE_PORTS: Final = "inference.networking.k8s.io/active-ports"
"""The older name of LLMD_ACTIVE_PORTS, which has precedence."""

FABRIC_DOMAIN: Final = f"{GROUP}/fabric-domain"
"""On pods, or among the node labels that they select: the domain within which KV is transferred
faster than beyond it, such as a rack. User → EPP; the configuration may name another label for
pods without this one, which the operator sets to `placement.topologyKey`."""

HOSTNAME: Final = "kubernetes.io/hostname"
"""Kubernetes' label of nodes with the host's name."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"

ENDPOINT_PREFIX: Final = f"endpoint.{GROUP}/"
"""`endpoint.tandem.dev/NAME` on every pod that serves behind routing endpoint NAME, one label per
endpoint; its value is `prefill` or `decode` (`decode` on unified pods). An EPP lists pods by the
key; the Service for plain load balancing selects by key and value. The operator patches it on live
pods."""

ENDPOINT: Final = f"{GROUP}/endpoint"
"""On the objects that serve a routing endpoint (Services, Envoy, EPP, plan keys), not on pods: its
name. The operator writes it and lists by it."""

MODEL_PULL: Final = f"{GROUP}/model-pull"
"""On the Job that downloads a set's model, and on its pods, beside `POOL` with the set's name: the
kind of pool that names the set. These pods have no role, so no selector of serving pods has them.
The operator writes it and finds both by it."""

KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""The operator copies labels with this prefix from a pool to its pods: Kueue's queue and priority.
User → operator → Kueue."""

# Annotations.

SERVED_MODELS: Final = f"{GROUP}/served-models"
"""On pods: JSON list of the model names that clients may request. An annotation, because a label
value may not contain every model name. Operator → EPP."""
TARGET_PORT: Final = f"{GROUP}/target-port"
"""On pods that the operator did not create: the serving port, if it is not 8000. User → EPP."""
RESTARTED_AT: Final = f"{GROUP}/restartedAt"
"""On pools: a new value creates a new revision, like `kubectl rollout restart`. User → operator."""
ATTEMPT: Final = f"{GROUP}/attempt"
"""On pods: how many predecessors ended soon after their start. The operator delays the next
replacement by it (back-off). Operator → operator."""
SIDECAR_FLAGS: Final = f"{GROUP}/sidecar-flags"
"""On decode pods: JSON, the sidecar's flags that change while it runs, by name. The operator
patches it on live pods. Operator → sidecar, as its `--config` through a downwardAPI volume."""
STORAGE_BOUNDS: Final = f"{GROUP}/storage-bounds"
"""On pods with external storage: JSON, the bounds of the store's namespace, which the operator
patches on live pods. Operator → engine, as a file of a downwardAPI volume."""
PULLED_MODEL: Final = f"{GROUP}/pulled-model"
"""On pods whose model was downloaded before them: JSON with repository, revision, claim, and the
commit that the revision was then. Pods of later revisions of the set get the same commit.
Operator → operator."""
CONFIG_HASH: Final = f"{GROUP}/config-hash"
"""On pods whose process reads its configuration only at start: a new value rolls them. Operator."""
UNUSED_SINCE: Final = f"{GROUP}/unused-since"
"""On a Service of an endpoint that no pool names any more: since when, as `2026-01-31T10:00:00Z`.
Operator → operator."""
SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
"""On pods: they may be evicted to remove their node, although they have local volumes and an owner
that the autoscaler does not know. Operator → cluster autoscaler."""
SCHEMA_VERSION: Final = f"{GROUP}/schema-version"
"""On the CRDs: the release's schema number, compared by the operator at startup."""


def endpoint_label(endpoint: str) -> str:
    """The label key of the pods that serve behind `endpoint`."""
    return f"{ENDPOINT_PREFIX}{endpoint}"
