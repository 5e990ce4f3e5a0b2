"""The common parts of an endpoint's objects: names, labels, owners, builders by kind. Pure.

docs/understand/operator.md has a table of all objects and their names.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL

from ...observed import Body
from ...planning.api_objects import FIELD_MANAGER
from ...planning.key_rotation import secret_data
from ...pods.containers import container_security, pod_security
from ...pods.manifests import plan_key_secret
from ...resources.spec import RouterPodMetadata
from ..endpoint.observed import (
    ApiKind,
    EndpointPool,
    ObjectRef,
    ObservedEndpoint,
    UnreadablePool,
)
from ..endpoint.settings import RouterSettings

Object = dict[str, Any]

ENVOY: Final = "envoy"
EPP: Final = "epp"
ROUTER: Final = "router"
"""`ENVOY`, `EPP` and `ROUTER` are values of the label `app.kubernetes.io/component` and names of
containers."""
API_KEY_DIRECTORY: Final = "/etc/tandem/api-key-secret"
_API_KEY_VOLUME: Final = "api-key-secret"
API_KEY_MOUNT: Final = {"name": _API_KEY_VOLUME, "mountPath": API_KEY_DIRECTORY, "readOnly": True}
"""Of `api_key_volume`."""
_MIN_READY_SECONDS: Final = 8
"""Seconds after which a ready pod counts as available: by then Envoy can resolve its name. The
cluster's DNS caches a negative answer for 5 s, Envoy looks names up every 2 s, and EndpointSlices
follow a pod's readiness within 1 s."""


class Names:
    """The names of an endpoint's objects."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.envoy = f"{endpoint}-envoy"
        self.epp = f"{endpoint}-epp"
        self.epp_pods = f"{endpoint}-epp-pods"
        self.epp_peers = f"{endpoint}-epp-peers"
        self.router = f"{endpoint}-router"
        self.router_peers = f"{endpoint}-router-peers"
        self.decode = f"{endpoint}-decode"
        self.prefill = f"{endpoint}-prefill"
        self.plan_keys = plan_key_secret(endpoint)


def kept_objects(endpoint: str) -> tuple[ObjectRef, ...]:
    """The objects that stay for a while after the last pool: addresses that clients and gateways
    may hold, and the keys that pods of a pool which is created again mount at once.

    In the order in which they are deleted: no one lists Secrets, so that a Service leads to them.
    """
    names = Names(endpoint)
    return (
        ObjectRef("v1", "Secret", names.plan_keys),
        ObjectRef("v1", "Service", names.epp),
        ObjectRef("v1", "Service", names.endpoint),
    )


def is_taken_over(endpoint: str, body: Body) -> bool:
    """Whether one of the `kept_objects` is a Service that selects other pods than the operator
    writes. Then someone else has made it theirs while no pool owned it: server-side apply leaves
    our labels on it."""
    names = Names(endpoint)
    components = {names.epp: (EPP,), names.endpoint: (ENVOY, ROUTER)}
    ours = components.get(body["metadata"]["name"])
    if body["kind"] != "Service" or ours is None:
        return False
    return body["spec"].get("selector") not in [_selector(endpoint, each) for each in ours]


def body(
    observed: ObservedEndpoint, kind: ApiKind, name: str, component: str, **content: Any
) -> Object:
    """An object of the endpoint.

    Every pool that names the endpoint owns it, so garbage collection deletes it with the last one.
    No one owns `kept_objects`.
    """
    is_kept = ObjectRef(*kind, name) in kept_objects(observed.key.name)
    owners: list[EndpointPool | UnreadablePool] = (
        [] if is_kept else [*observed.pools, *observed.unreadable_pools]
    )
    return {
        "apiVersion": kind[0],
        "kind": kind[1],
        "metadata": {
            "name": name,
            "namespace": observed.key.namespace,
            "labels": {**selector(observed, component), labels.MANAGED_BY: FIELD_MANAGER},
            # Without `controller`: only one owner may be that, and pools of one endpoint are
            # equals. Sorted, because drift detection compares lists by position.
            "ownerReferences": [
                {
                    "apiVersion": labels.API_VERSION,
                    "kind": DECODE_POOL,
                    "name": pool.name,
                    "uid": pool.uid,
                }
                for pool in sorted(owners, key=lambda pool: pool.uid)
            ],
        },
        **content,
    }


def selector(observed: ObservedEndpoint, component: str) -> dict[str, str]:
    """Labels that select one component's pods of one endpoint and no others."""
    return _selector(observed.key.name, component)


def _selector(endpoint: str, component: str) -> dict[str, str]:
    return {
        labels.NAME: "tandem",
        labels.INSTANCE: endpoint,
        labels.COMPONENT: component,
        labels.ENDPOINT: endpoint,
    }


def service(
    observed: ObservedEndpoint,
    name: str,
    component: str,
    port: tuple[str, int],
    *,
    pods: Mapping[str, str] | None = None,
    headless: bool = False,
    unready: bool = False,
) -> Object:
    """A Service with one named port that selects the component's pods, or those labelled `pods`;
    with `unready` also while they are not ready."""
    spec: dict[str, Any] = {
        "selector": dict(pods or selector(observed, component)),
        "ports": [{"name": port[0], "port": port[1], "targetPort": port[1], "protocol": "TCP"}],
    }
    if headless:
        spec["clusterIP"] = "None"
    if unready:
        spec["publishNotReadyAddresses"] = True
    return body(observed, ("v1", "Service"), name, component, spec=spec)


def config_map(
    observed: ObservedEndpoint, name: str, component: str, data: dict[str, str]
) -> Object:
    return body(observed, ("v1", "ConfigMap"), name, component, data=data)


def plan_key_object(observed: ObservedEndpoint, keys: Mapping[str, bytes]) -> Object:
    """The Secret of plan keys, which the EPP and the sidecars mount."""
    name = Names(observed.key.name).plan_keys
    return body(
        observed, ("v1", "Secret"), name, "plan-keys", type="Opaque", data=secret_data(keys)
    )


def stated_hash(*stated: Mapping[str, str]) -> dict[str, str]:
    """An annotation with the hash of what a pool states: by it the operator notices an entry that
    was removed there. It cannot compare the entries, of which others write some as well."""
    text = json.dumps(stated, sort_keys=True)
    return {labels.CONFIG_HASH: hashlib.sha256(text.encode()).hexdigest()[:16]}


def deployment(
    observed: ObservedEndpoint,
    name: str,
    component: str,
    replicas: int,
    template: Object,
    *,
    stated: RouterPodMetadata,
) -> Object:
    """A Deployment whose rolling update never takes it below `replicas` pods; `stated`: what pools
    state of its pods' metadata."""
    own = {**selector(observed, component), labels.MANAGED_BY: FIELD_MANAGER}
    own_annotations = template.get("metadata", {}).get("annotations", {})
    metadata = {"labels": {**stated.labels, **own}}
    if annotations := {**stated.annotations, **own_annotations}:
        metadata["annotations"] = annotations
    spec = {
        "replicas": replicas,
        "minReadySeconds": _MIN_READY_SECONDS,
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector(observed, component)},
        "strategy": {
            "type": "RollingUpdate",
            # A new pod must be available before an old one goes: a gap would leave requests without
            # a router.
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": {"metadata": metadata, "spec": template["spec"]},
    }
    made = body(observed, ("apps/v1", "Deployment"), name, component, spec=spec)
    made["metadata"]["annotations"] = stated_hash(stated.labels, stated.annotations)
    return made


def budget(observed: ObservedEndpoint, name: str, component: str) -> Object:
    """A PodDisruptionBudget that lets one pod at a time be evicted.

    That includes the only pod: otherwise its node could not be drained.
    """
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(observed, component)},
    }
    return body(observed, ("policy/v1", "PodDisruptionBudget"), name, component, spec=spec)


def pod_spec(
    observed: ObservedEndpoint, settings: RouterSettings, component: str, **more: Any
) -> Object:
    """A pod spec for a component: unprivileged, spread over nodes, placed as in `settings`."""
    spec: dict[str, Any] = {
        # Variables of Services could be taken for the EPP's flags, see `pods.manifests`.
        "enableServiceLinks": False,
        "securityContext": pod_security(assigned_user=settings.assigned_users),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                # A preference only: on a single node all replicas must still be scheduled.
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(observed, component)},
            }
        ],
        **more,
    }
    optional = {
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(toleration) for toleration in settings.tolerations],
        "priorityClassName": settings.priority_class,
    }
    return {**spec, **{name: value for name, value in optional.items() if value}}


def api_key_volume(secret: str) -> Object:
    """The Secret with the API keys of clients."""
    return {"name": _API_KEY_VOLUME, "secret": {"secretName": secret}}


def api_key_secret(deployment: Body | None) -> str | None:
    """Name of the Secret with API keys that a front's Deployment uses; None: it uses none."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes", ()) if deployment else ()
    names = (v["secret"]["secretName"] for v in volumes if v["name"] == _API_KEY_VOLUME)
    return next(names, None)


def container(settings: RouterSettings, **content: Any) -> Object:
    """A container without privileges and with a read-only root file system."""
    policy = settings.image_pull_policy
    return {
        **({"imagePullPolicy": policy} if policy else {}),
        "securityContext": container_security(read_only=True),
        **content,
    }
