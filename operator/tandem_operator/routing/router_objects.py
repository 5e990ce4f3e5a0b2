"""The objects of an endpoint that are neither Envoy nor EPP, and what all of them have in common.

Pure. Names are the table's in docs/operator.md.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tandem_contract import labels, ports
from tandem_contract.custom_resources import DECODE_POOL

from ..pods.containers import container_security, pod_security
from ..pods.manifests import plan_key_secret
from ..resources.spec import GatewayRef
from .plan_keys import secret_data
from .router_observed import (
    HTTP_ROUTE,
    INFERENCE_POOL,
    INFERENCE_POOL_ALPHA,
    ApiKind,
    EndpointPool,
    ObservedEndpoint,
    RouterSettings,
    UnreadPool,
)

Object = dict[str, Any]

OPERATOR: Final = "tandem-operator"
_KNOWN_AFTER: Final = 8
"""Seconds after which a ready pod counts as available: by then its name is everywhere. The
cluster's DNS caches that there was none for 5 s, Envoy asks every 2, and endpoints trail readiness
by 1."""
_GATEWAY_GROUP: Final = "gateway.networking.k8s.io"


class Names:
    """What the objects of an endpoint are called."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.envoy = f"{endpoint}-envoy"
        self.epp = f"{endpoint}-epp"
        self.epp_pods = f"{endpoint}-epp-pods"
        self.decode = f"{endpoint}-decode"
        self.plan_keys = plan_key_secret(endpoint)


def body(
    observed: ObservedEndpoint, kind: ApiKind, name: str, component: str, **content: Any
) -> Object:
    """An object of the endpoint, owned by every pool that names it."""
    owners: list[EndpointPool | UnreadPool] = [*observed.pools, *observed.unread]
    return {
        "apiVersion": kind[0],
        "kind": kind[1],
        "metadata": {
            "name": name,
            "namespace": observed.key.namespace,
            "labels": {**selector(observed, component), labels.MANAGED_BY: OPERATOR},
            "ownerReferences": [
                {
                    "apiVersion": labels.API_VERSION,
                    "kind": DECODE_POOL,
                    "name": one.name,
                    "uid": one.uid,
                }
                for one in sorted(owners, key=lambda one: one.uid)
            ],
        },
        **content,
    }


def selector(observed: ObservedEndpoint, component: str) -> dict[str, str]:
    """The labels that tell one component's pods of one endpoint from all others."""
    return {
        labels.NAME: "tandem",
        labels.INSTANCE: observed.key.name,
        labels.COMPONENT: component,
        labels.ENDPOINT: observed.key.name,
    }


def service(
    observed: ObservedEndpoint,
    name: str,
    component: str,
    port: tuple[str, int],
    *,
    pods: Mapping[str, str] | None = None,
    headless: bool = False,
) -> Object:
    """A Service on one named port, of the component's pods or of those with the labels `pods`."""
    spec: dict[str, Any] = {
        "selector": dict(pods or selector(observed, component)),
        "ports": [{"name": port[0], "port": port[1], "targetPort": port[1], "protocol": "TCP"}],
    }
    if headless:
        spec["clusterIP"] = "None"
    return body(observed, ("v1", "Service"), name, component, spec=spec)


def config_map(
    observed: ObservedEndpoint, name: str, component: str, data: dict[str, str]
) -> Object:
    return body(observed, ("v1", "ConfigMap"), name, component, data=data)


def plan_key_object(observed: ObservedEndpoint, keys: Mapping[str, bytes]) -> Object:
    """The Secret that EPP and sidecars mount."""
    name = Names(observed.key.name).plan_keys
    return body(
        observed, ("v1", "Secret"), name, "plan-keys", type="Opaque", data=secret_data(keys)
    )


def deployment(
    observed: ObservedEndpoint, name: str, component: str, replicas: int, template: Object
) -> Object:
    """A Deployment that never has fewer pods than it should while it rolls."""
    pod_labels = {**selector(observed, component), labels.MANAGED_BY: OPERATOR}
    metadata = {**template.get("metadata", {}), "labels": pod_labels}
    spec = {
        "replicas": replicas,
        "minReadySeconds": _KNOWN_AFTER,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector(observed, component)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": {"metadata": metadata, "spec": template["spec"]},
    }
    return body(observed, ("apps/v1", "Deployment"), name, component, spec=spec)


def budget(observed: ObservedEndpoint, name: str, component: str) -> Object:
    """One pod at a time may be evicted: also the only one, or a node could not be emptied."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(observed, component)},
    }
    return body(observed, ("policy/v1", "PodDisruptionBudget"), name, component, spec=spec)


def pod_spec(
    observed: ObservedEndpoint, settings: RouterSettings, component: str, **more: Any
) -> Object:
    """What both components' pods are: unprivileged, spread over nodes, placed as set."""
    spec: dict[str, Any] = {
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(observed, component)},
            }
        ],
        **more,
    }
    optional = {
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "priorityClassName": settings.priority_class,
    }
    return {**spec, **{name: value for name, value in optional.items() if value}}


def container(settings: RouterSettings, **content: Any) -> Object:
    """A container that may do nothing but what it is for."""
    policy = settings.image_pull_policy
    return {
        **({"imagePullPolicy": policy} if policy else {}),
        "securityContext": container_security(read_only=True),
        **content,
    }


def inference_pool(observed: ObservedEndpoint, epp: str) -> Object:
    """The decode pods and their picker as an inference gateway knows them.

    Of the kind's first version that the cluster has. FailOpen is what our Envoy does: without a
    picker, any decode pod.
    """
    pods = {labels.endpoint_label(observed.key.name): "decode"}
    name = observed.key.name
    picker: dict[str, Any]
    spec: dict[str, Any]
    if INFERENCE_POOL in observed.kinds:
        picker = {"name": epp, "port": {"number": ports.EPP_GRPC}, "failureMode": "FailOpen"}
        spec = {
            "selector": {"matchLabels": pods},
            "targetPorts": [{"number": ports.SIDECAR}],
            "endpointPickerRef": picker,
        }
        return body(observed, INFERENCE_POOL, name, "router", spec=spec)
    picker = {"name": epp, "portNumber": ports.EPP_GRPC, "failureMode": "FailOpen"}
    spec = {"selector": pods, "targetPortNumber": ports.SIDECAR, "extensionRef": picker}
    return body(observed, INFERENCE_POOL_ALPHA, name, "router", spec=spec)


def http_route(observed: ObservedEndpoint, gateways: Sequence[GatewayRef]) -> Object:
    """From the gateways to the InferencePool; an answer takes as long as it takes."""
    group, kind = INFERENCE_POOL if INFERENCE_POOL in observed.kinds else INFERENCE_POOL_ALPHA
    backend = {"group": group.partition("/")[0], "kind": kind, "name": observed.key.name}
    spec = {
        "parentRefs": [_parent(gateway) for gateway in gateways],
        "rules": [{"backendRefs": [backend], "timeouts": {"request": "0s"}}],
    }
    return body(observed, HTTP_ROUTE, observed.key.name, "router", spec=spec)


def _parent(gateway: GatewayRef) -> dict[str, str]:
    named = {
        "group": _GATEWAY_GROUP,
        "kind": "Gateway",
        "name": gateway.name,
        "namespace": gateway.namespace,
        "sectionName": gateway.section_name,
    }
    return {key: value for key, value in named.items() if value is not None}
