"""Settings that every endpoint's Envoy, EPP and router share, and the file of `--router-settings`.

All fields of the file are optional; a field that it leaves out keeps the default of RouterSettings:

    envoy: {replicas: 2, threads: 4, resources: {limits: {memory: 1Gi}}}
    epp: {replicas: 2, resources: {requests: {cpu: 250m}}, envFrom: [{secretRef: {name: otlp}}]}
    router: {replicas: 3, resources: {requests: {cpu: "1"}, limits: {memory: 4Gi}}}
    nodeSelector: {disk: fast}
    tolerations: [{key: router, operator: Exists}]
    priorityClassName: high
    imagePullSecrets: [{name: registry}]      # each must exist in the pools' namespaces
    networkPolicy:                            # without it, the operator writes no NetworkPolicies
      operator: {namespace: tandem-system, podLabels: {app: operator}}
      prometheusNamespaces: [monitoring]
      gatewayNamespaces: [gateways]
      controlPlaneCIDRs: [10.0.0.0/28]

Errors: `DocumentError`, with file, line and field.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from tandem_contract.documents import Document, DocumentError, load_documents
from tandem_contract.quantities import quantity

from ...observed import Body
from ...resources.resolve import own_version

_FIELD_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
"""The part of msgspec's message that names the field."""
_Count = Annotated[int, msgspec.Meta(ge=1, le=100)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class NetworkPolicySettings:
    """Who may connect to an endpoint's pods, besides these pods themselves."""

    operator_namespace: str
    operator_labels: Mapping[str, str]
    """The operator reads an engine's counters, and the sidecar's admin port."""
    prometheus_namespaces: tuple[str, ...] = ()
    """Empty: no pod may scrape metrics, except where a metrics port serves requests, too."""
    gateway_namespaces: tuple[str, ...] = ()
    """Where proxies of inference gateways, and pickers other than Tandem's, run. Empty: pools that
    are behind such a gateway take requests from everyone."""
    control_plane_cidrs: tuple[str, ...] = ()
    """Addresses of the API server, or of the agents that connect for it. Empty: `tandem doctor` and
    `tandem trace`, which go through the API server, may not reach the pods."""


@dataclass(frozen=True)
class RouterSettings:
    """Settings of every endpoint's Envoy and EPP; the operator's flags and the chart set them."""

    tandem_image: str = field(default_factory=lambda: f"tandem:{own_version()}")
    """Image of the EPP, and of the drain container beside Envoy."""
    envoy_image: str = "envoyproxy/envoy:distroless-v1.40.0"
    """Upstream's image; the bootstrap configuration is tested with this version."""
    image_pull_policy: str | None = None
    """None leaves it to Kubernetes, which derives the policy from the tag."""
    image_pull_secrets: tuple[str, ...] = ()
    assigned_users: bool = False
    """As `Defaults.assigned_users`."""
    envoy_threads: int = 4
    """Envoy's `--concurrency`; Envoy's own default is one worker per core of the node."""
    envoy_replicas: int = 2
    """Two, so that the loss of a node is no outage."""
    epp_replicas: int = 2
    """Used where no pool sets it. Two, so that the loss of a node is no outage; they tell each
    other what they place. With one, Envoy balances over the decode pods while it restarts."""
    envoy_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "50m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        }
    )
    """Envoy buffers request bodies of up to 16 MiB while the EPP chooses a pod. CPU for some
    hundred requests per second, small enough for the quickstart on two cores."""
    epp_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        }
    )
    """CPU for some hundred requests per second, small enough for the quickstart on two cores. No
    CPU limit: CPU throttling of the EPP delays the first token."""
    router_resources: Mapping[str, Any] = field(
        default_factory=lambda: {
            "requests": {"cpu": "250m", "memory": "256Mi"},
            "limits": {"memory": "2Gi"},
        }
    )
    """Of the router where it is the front; where the file states none, but `epp.resources`, those.
    Every byte passes through it, and an end for lack of memory breaks all its streams. It holds
    bodies in a quarter of the limit, 512 MiB, each of them up to three times."""
    router_replicas: int | None = None
    """As `epp_replicas`, of routers; None: as many as EPPs. A router serves what one core does, so
    a large endpoint needs more of them."""
    envoy_env: Mapping[str, tuple[Body, ...]] = field(default_factory=dict)
    """`env` and `envFrom` of Envoy's container, as in a container."""
    epp_env: Mapping[str, tuple[Body, ...]] = field(default_factory=dict)
    """The same of the EPP's."""
    storage_offloading: bool = False
    """Whether EPPs count KV in the pools' external stores when they choose pods."""
    key_period: float = 24 * 3600.0
    """Seconds for which one plan key signs. A period under an hour remounts Secrets without making
    anything safer."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Body, ...] = ()
    priority_class: str | None = None
    network_policy: NetworkPolicySettings | None = None
    """None: no NetworkPolicies are written, and those of an earlier setting are deleted. The chart
    sets it; without the chart, the operator may run where no policy can name it."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class _Resources(_Strict, frozen=True, omit_defaults=True):
    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class _EnvVar(_Strict, frozen=True, omit_defaults=True):
    name: _Text
    value: str | None = None
    value_from: dict[str, Any] | None = None


class _EnvSource(_Strict, frozen=True, omit_defaults=True):
    prefix: str | None = None
    config_map_ref: dict[str, Any] | None = None
    secret_ref: dict[str, Any] | None = None


class _Epp(_Strict, frozen=True):
    replicas: _Count | None = None
    resources: _Resources | None = None
    env: tuple[_EnvVar, ...] = ()
    env_from: tuple[_EnvSource, ...] = ()


class _Router(_Strict, frozen=True):
    replicas: _Count | None = None
    resources: _Resources | None = None


class _Envoy(_Epp, frozen=True):
    threads: _Count | None = None


class _StorageOffloading(_Strict, frozen=True):
    enabled: bool = False


class _KvCacheIndex(_Strict, frozen=True):
    storage_offloading: _StorageOffloading = _StorageOffloading()


class _Toleration(_Strict, frozen=True, omit_defaults=True):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class _Secret(_Strict, frozen=True):
    name: _Text


class _Operator(_Strict, frozen=True):
    namespace: _Text
    pod_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


class _NetworkPolicy(_Strict, frozen=True):
    operator: _Operator
    prometheus_namespaces: tuple[_Text, ...] = ()
    gateway_namespaces: tuple[_Text, ...] = ()
    control_plane_cidrs: tuple[_Text, ...] = msgspec.field(name="controlPlaneCIDRs", default=())


class _File(_Strict, frozen=True):
    envoy: _Envoy = _Envoy()
    epp: _Epp = _Epp()
    router: _Router = _Router()
    kv_cache_index: _KvCacheIndex = _KvCacheIndex()
    node_selector: dict[str, str] = {}
    tolerations: tuple[_Toleration, ...] = ()
    priority_class_name: _Text | None = None
    image_pull_secrets: tuple[_Secret, ...] = ()
    network_policy: _NetworkPolicy | None = None


def load_router_settings(file: Path, settings: RouterSettings) -> RouterSettings:
    """`settings`, overridden by what `file` sets.

    Raises DocumentError when the file cannot be read or a field is wrong.
    """
    documents = load_documents(file)
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        fields = ", ".join(field.encode_name for field in msgspec.structs.fields(_File))
        raise DocumentError(f"{file}:1: expected one YAML mapping of {fields}")
    document = documents[0]
    content = _parse(document)
    epp_resources = _resources(document, "epp", content.epp.resources)
    overrides: dict[str, Any] = {
        "envoy_replicas": content.envoy.replicas,
        "envoy_threads": content.envoy.threads,
        "envoy_resources": _resources(document, "envoy", content.envoy.resources),
        "envoy_env": _env(content.envoy),
        "epp_env": _env(content.epp),
        "epp_replicas": content.epp.replicas,
        "epp_resources": epp_resources,
        "router_replicas": content.router.replicas,
        "router_resources": _resources(document, "router", content.router.resources)
        or epp_resources,
        "storage_offloading": content.kv_cache_index.storage_offloading.enabled,
        "node_selector": content.node_selector,
        "tolerations": tuple(msgspec.to_builtins(content.tolerations)),
        "priority_class": content.priority_class_name,
        "image_pull_secrets": tuple(secret.name for secret in content.image_pull_secrets),
        "network_policy": _network_policy(document, content.network_policy),
    }
    # A field that the file leaves out is None or empty here and keeps its default.
    return replace(settings, **{name: value for name, value in overrides.items() if value})


def _parse(document: Document) -> _File:
    try:
        return msgspec.convert(document.data, _File)
    except msgspec.ValidationError as err:
        path = _FIELD_PATH.search(str(err))
        message = _FIELD_PATH.sub("", str(err))
        raise document.error(path[1] if path else "", message) from err


def _env(component: _Epp) -> dict[str, tuple[Body, ...]]:
    lists = {"env": component.env, "envFrom": component.env_from}
    return {name: tuple(msgspec.to_builtins(items)) for name, items in lists.items() if items}


def _network_policy(
    document: Document, policy: _NetworkPolicy | None
) -> NetworkPolicySettings | None:
    if policy is None:
        return None
    for index, cidr in enumerate(policy.control_plane_cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError as err:
            path = ("networkPolicy", "controlPlaneCIDRs", index)
            raise document.error(path, f"{err}: write a CIDR such as 10.0.0.0/28") from err
    return NetworkPolicySettings(
        policy.operator.namespace,
        policy.operator.pod_labels,
        policy.prometheus_namespaces,
        policy.gateway_namespaces,
        policy.control_plane_cidrs,
    )


def _resources(
    document: Document, component: str, resources: _Resources | None
) -> Mapping[str, Any] | None:
    if resources is None:
        return None
    values: dict[str, dict[str, Any]] = msgspec.to_builtins(resources)
    for kind, amounts in values.items():
        for name, amount in amounts.items():
            if quantity(amount) is None:
                path = (component, "resources", kind, name)
                raise document.error(path, f"{amount!r} is no quantity: write 500m, 2 or 1Gi")
    return values
