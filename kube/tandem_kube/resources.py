"""API paths of resources: `Resource("apps/v1", "deployments").path("ns", "name")`. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

Object = dict[str, Any]
"""An API object as JSON."""


@dataclass(frozen=True)
class Resource:
    """A resource type as API paths name it."""

    api_version: str
    """`v1`, or `group/version`."""
    plural: str

    @property
    def group(self) -> str:
        """Empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """The path of the collection, of one object, or of its subresource.

        Without `namespace`: of a cluster-scoped resource, or across all namespaces.
        """
        parts = ["apis" if self.group else "api", self.api_version]
        parts += ["namespaces", quote(namespace, safe="")] if namespace else []
        parts.append(self.plural)
        parts += [quote(name, safe="")] if name else []
        parts += [subresource] if subresource else []
        return "/" + "/".join(parts)


PODS: Final = Resource("v1", "pods")
NODES: Final = Resource("v1", "nodes")
SERVICES: Final = Resource("v1", "services")
SECRETS: Final = Resource("v1", "secrets")
CONFIG_MAPS: Final = Resource("v1", "configmaps")
SERVICE_ACCOUNTS: Final = Resource("v1", "serviceaccounts")
DEPLOYMENTS: Final = Resource("apps/v1", "deployments")
CONTROLLER_REVISIONS: Final = Resource("apps/v1", "controllerrevisions")
JOBS: Final = Resource("batch/v1", "jobs")
POD_DISRUPTION_BUDGETS: Final = Resource("policy/v1", "poddisruptionbudgets")
NETWORK_POLICIES: Final = Resource("networking.k8s.io/v1", "networkpolicies")
ROLES: Final = Resource("rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDINGS: Final = Resource("rbac.authorization.k8s.io/v1", "rolebindings")
LEASES: Final = Resource("coordination.k8s.io/v1", "leases")
EVENTS: Final = Resource("events.k8s.io/v1", "events")
CUSTOM_RESOURCE_DEFINITIONS: Final = Resource(
    "apiextensions.k8s.io/v1", "customresourcedefinitions"
)
INFERENCE_POOLS: Final = Resource("inference.networking.k8s.io/v1", "inferencepools")
_LLMD: Final = "llm-d.ai/v1alpha2"
_OLDER_INFERENCE: Final = "inference.networking.x-k8s.io/v1alpha2"
MODEL_REWRITES: Final = Resource(_LLMD, "inferencemodelrewrites")
OLDER_MODEL_REWRITES: Final = Resource(_OLDER_INFERENCE, "inferencemodelrewrites")
OBJECTIVES: Final = Resource("llm-d.ai/v1", "inferenceobjectives")
ALPHA_OBJECTIVES: Final = Resource(_LLMD, "inferenceobjectives")
OLDER_OBJECTIVES: Final = Resource(_OLDER_INFERENCE, "inferenceobjectives")
HTTP_ROUTES: Final = Resource("gateway.networking.k8s.io/v1", "httproutes")

KINDS: Final[Mapping[str, Resource]] = {
    "Pod": PODS,
    "Service": SERVICES,
    "Secret": SECRETS,
    "ConfigMap": CONFIG_MAPS,
    "ServiceAccount": SERVICE_ACCOUNTS,
    "Deployment": DEPLOYMENTS,
    "ControllerRevision": CONTROLLER_REVISIONS,
    "PodDisruptionBudget": POD_DISRUPTION_BUDGETS,
    "NetworkPolicy": NETWORK_POLICIES,
    "Role": ROLES,
    "RoleBinding": ROLE_BINDINGS,
    "InferencePool": INFERENCE_POOLS,
    "HTTPRoute": HTTP_ROUTES,
}
"""The kinds that Tandem writes, by the `kind` of an object."""


def resource_of(body: Mapping[str, Any]) -> Resource:
    """The resource of an object. Raises KeyError when its kind is not in `KINDS`."""
    # The version is the object's own: InferencePool exists in two groups with the same plural.
    return Resource(body["apiVersion"], KINDS[body["kind"]].plural)
