"""Labels on Tandem's pods: the operator writes them, EPPs and selectors read them."""

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

LLMD_ROLE: Final = "llm-d.ai/role"
"""The same role under llm-d's name, so that its EPP finds our pods."""

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
NAME: Final = "app.kubernetes.io/name"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"

ENDPOINT_PREFIX: Final = f"endpoint.{GROUP}/"
"""`endpoint.tandem.dev/NAME` on every pod that serves behind routing endpoint NAME, one label per
endpoint; its value is `prefill` or `decode` (unified pods say decode). EPPs list by the key, the
plain-balancing Service selects by key and value. The operator patches it on live pods."""

ENDPOINT: Final = f"{GROUP}/endpoint"
"""On the objects that serve a routing endpoint (Services, Envoy, EPP, keys), not on the pods of its
pools: the endpoint's name. The operator writes it and lists by it."""

KUEUE_PREFIX: Final = "kueue.x-k8s.io/"
"""Labels of this prefix on a pool are put on its pods: the queue that admits them, their priority.
User → operator → Kueue."""

# Annotations.

SERVED_MODELS: Final = f"{GROUP}/served-models"
"""On pods: JSON list of the exact model names clients may ask for (a label could not hold them).
Operator → EPP."""
TARGET_PORT: Final = f"{GROUP}/target-port"
"""On pods that are not the operator's: serving port, where it is not 8000. User → EPP."""
RESTARTED_AT: Final = f"{GROUP}/restartedAt"
"""On pools: a new value makes a new revision, like `kubectl rollout restart`. User → operator."""
ATTEMPT: Final = f"{GROUP}/attempt"
"""On pods: how many before this one ended soon after their start; the next waits the longer.
Operator → operator."""
CONFIG_HASH: Final = f"{GROUP}/config-hash"
"""On pods whose process reads its configuration once: a new value rolls them. Operator."""
SCHEMA_VERSION: Final = f"{GROUP}/schema-version"
"""On the CRDs: the release's schema number, compared by the operator at startup."""


def endpoint_label(endpoint: str) -> str:
    """The key that marks a pod as serving behind `endpoint`."""
    return f"{ENDPOINT_PREFIX}{endpoint}"
