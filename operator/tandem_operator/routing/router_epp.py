"""The endpoint picker in a cluster: Deployment, configuration, rights, addresses. Pure."""

import json
from typing import Any, Final

from tandem_contract import endpoints, ports

from .router_objects import (
    Names,
    Object,
    body,
    budget,
    config_map,
    container,
    deployment,
    pod_spec,
    service,
)
from .router_observed import ObservedEndpoint, RouterSettings
from .router_wants import Wants

EPP: Final = "epp"
"""Component and container."""

_CONFIG_DIRECTORY: Final = "/etc/tandem/router"
_CONFIG_FILE: Final = "router.yaml"
_KEY_DIRECTORY: Final = "/var/run/tandem/plan-keys"
_LEAVING: Final = 15
"""Seconds a picker serves on after it was told to stop: Envoys look its successor's address up
every other second, name servers keep an answer for a few."""
_RBAC: Final = "rbac.authorization.k8s.io"


def epp_objects(observed: ObservedEndpoint, wants: Wants, settings: RouterSettings) -> list[Object]:
    """All of the EPP's but its keys; what its pods need comes before them.

    The configuration is read anew when it changes, so a new one starts no new pods.
    """
    names = Names(observed.key.name)
    config = {**wants.epp_config, "disaggregated_serving": wants.serving}
    document = json.dumps(config, indent=1, sort_keys=True)
    replicas = wants.epp_replicas or settings.epp_replicas
    return [
        *_rights(observed, names.epp),
        service(observed, names.epp, EPP, ("grpc", ports.EPP_GRPC)),
        service(observed, names.epp_pods, EPP, ("grpc", ports.EPP_GRPC), headless=True),
        config_map(observed, names.epp, EPP, {_CONFIG_FILE: document}),
        deployment(observed, names.epp, EPP, replicas, _template(observed, settings)),
        budget(observed, names.epp, EPP),
    ]


def _rights(observed: ObservedEndpoint, name: str) -> list[Object]:
    """To see the pods of its namespace, and nothing else."""
    account = ("v1", "ServiceAccount")
    role, binding = (f"{_RBAC}/v1", "Role"), (f"{_RBAC}/v1", "RoleBinding")
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    subject = {"kind": account[1], "name": name, "namespace": observed.key.namespace}
    reference = {"apiGroup": _RBAC, "kind": role[1], "name": name}
    return [
        body(observed, account, name, EPP, automountServiceAccountToken=False),
        body(observed, role, name, EPP, rules=rules),
        body(observed, binding, name, EPP, roleRef=reference, subjects=[subject]),
    ]


def _template(observed: ObservedEndpoint, settings: RouterSettings) -> Object:
    names = Names(observed.key.name)
    volumes: dict[str, Any] = {
        "config": {"configMap": {"name": names.epp}},
        "plan-keys": {"secret": {"secretName": names.plan_keys}},
    }
    spec = pod_spec(
        observed,
        settings,
        EPP,
        serviceAccountName=names.epp,
        automountServiceAccountToken=True,
        terminationGracePeriodSeconds=_LEAVING + 15,
        containers=[_container(observed, settings)],
        volumes=[{"name": name, **source} for name, source in volumes.items()],
    )
    return {"spec": spec}


def _container(observed: ObservedEndpoint, settings: RouterSettings) -> Object:
    return container(
        settings,
        name=EPP,
        image=settings.tandem_image,
        command=["tandem-epp"],
        args=[
            *("--discovery", "kubernetes"),
            *("--namespace", observed.key.namespace),
            *("--endpoint", observed.key.name),
            *("--config", f"{_CONFIG_DIRECTORY}/{_CONFIG_FILE}"),
            *("--plan-key-dir", _KEY_DIRECTORY),
        ],
        ports=[
            {"name": "grpc", "containerPort": ports.EPP_GRPC, "protocol": "TCP"},
            {"name": "health", "containerPort": ports.EPP_HEALTH, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ports.EPP_METRICS, "protocol": "TCP"},
        ],
        readinessProbe=_probe(endpoints.READY, failures=2),
        livenessProbe=_probe(endpoints.LIVE, failures=6),
        lifecycle={"preStop": {"sleep": {"seconds": _LEAVING}}},
        resources=dict(settings.epp_resources),
        volumeMounts=[
            {"name": "config", "mountPath": _CONFIG_DIRECTORY, "readOnly": True},
            {"name": "plan-keys", "mountPath": _KEY_DIRECTORY, "readOnly": True},
        ],
    )


def _probe(path: str, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": ports.EPP_HEALTH},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
