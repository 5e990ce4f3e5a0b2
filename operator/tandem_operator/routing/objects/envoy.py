"""The clients' Service, and Envoy's Deployment with the drain container, ConfigMap. Pure."""

import hashlib
import json
import math
from typing import Any, Final

from tandem_contract import labels, ports
from tandem_contract.api_paths import ApiPaths
from tandem_contract.quantities import quantity

from ...pods.containers import TLS_DIRECTORY, tls_mounts, tls_volumes
from ..endpoint.observed import ObservedEndpoint
from ..endpoint.requirements import EndpointRequirements
from ..endpoint.settings import RouterSettings
from ..envoy.bootstrap import BODY_LIMIT, LIVE, READY, EnvoySettings, envoy_bootstrap
from ..envoy.clusters import MutualTls
from .common import (
    API_KEY_DIRECTORY,
    API_KEY_MOUNT,
    ENVOY,
    Names,
    Object,
    api_key_volume,
    budget,
    config_map,
    container,
    deployment,
    pod_spec,
    service,
    stated_hash,
)

_DIRECTORY: Final = "/etc/envoy"
_FILE: Final = "envoy.json"
_API_KEYS_MOUNT: Final = {"name": "api-keys", "mountPath": "/run/tandem/api-keys"}
_API_KEY_FILE: Final = f"{_API_KEYS_MOUNT['mountPath']}/keys.json"
_GRACE_AFTER_DRAIN: Final = 15
"""Seconds between the end of a drain and SIGKILL."""
_STARTUP_PROBE: Final = {
    "httpGet": {"path": LIVE, "port": ports.ENVOY_HEALTH},
    # Its image has no program that could wait: a probe that comes too early writes an event.
    "initialDelaySeconds": 2,
    "periodSeconds": 2,
    "timeoutSeconds": 3,
    "failureThreshold": 150,
}
"""Until it passes, liveness and readiness wait: a slow start does not restart Envoy."""
_HEAP_SHARE: Final = 0.85
"""Envoy's heap limit as a share of the container's memory limit. The rest is for what Envoy's heap
does not count: thread stacks, code, and memory that the allocator holds back."""


def envoy_objects(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> list[Object]:
    """Envoy's objects; the Service comes before the pods that resolve its name."""
    names, tls = Names(observed.key.name), _tls(observed, required)
    # Sorted keys: equal settings give the same text, and so the same hash in the pods.
    bootstrap = json.dumps(_bootstrap(observed, required, settings), indent=1, sort_keys=True)
    decode = {labels.endpoint_label(observed.key.name): "decode"}
    return [
        service(
            observed, names.decode, "decode", ("http", ports.SIDECAR), pods=decode, headless=True
        ),
        config_map(observed, names.envoy, ENVOY, {_FILE: bootstrap, **_secret_files(tls)}),
        deployment(
            observed,
            names.envoy,
            ENVOY,
            settings.envoy_replicas,
            _template(observed, required, settings, bootstrap),
            stated=required.pod_metadata,
        ),
        budget(observed, names.envoy, ENVOY),
    ]


def client_service(
    observed: ObservedEndpoint, required: EndpointRequirements, front: str
) -> Object:
    """The Service that clients connect to, with the pods of the component `front`."""
    stated = required.service
    made = service(observed, Names(observed.key.name).endpoint, front, ("http", ports.ENVOY))
    # Always written: the API server would keep a type that the pool no longer states.
    made["spec"]["type"] = stated.type or "ClusterIP"
    # Tandem's own annotations are not the pools' to state: the operator removes `UNUSED_SINCE`.
    annotations = {
        name: value
        for name, value in stated.annotations.items()
        if not name.startswith(f"{labels.GROUP}/")
    }
    made["metadata"]["annotations"] = {**annotations, **stated_hash(annotations)}
    return made


def _bootstrap(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> dict[str, Any]:
    names, namespace = Names(observed.key.name), observed.key.namespace
    # Our own EPP pods are resolved one by one through the headless Service, so that Envoy balances
    # streams over them. With the operator's EPP disabled, the user may bring one behind a Service
    # of the EPP's name; until that exists, Envoy balances over the decode pods.
    epp = names.epp_pods if required.epp else names.epp
    limit = quantity(settings.envoy_resources.get("limits", {}).get("memory", ""))
    return envoy_bootstrap(
        EnvoySettings(
            epp_address=f"{epp}.{namespace}.svc",
            fallback=(f"{names.decode}.{namespace}.svc:{ports.SIDECAR}",),
            # An EPP made for inference gateways supports only bodies that are streamed both ways.
            body_mode="BUFFERED" if required.epp else "FULL_DUPLEX_STREAMED",
            response_bodies=not required.epp,
            reports_broken_answers=required.epp,
            needs_epp=required.separates_tenants,
            body_limit=required.max_request_bytes or BODY_LIMIT,
            api=ApiPaths(required.api_paths),
            health_port=ports.ENVOY_HEALTH,
            api_key_file=_API_KEY_FILE if required.api_key_secret else None,
            tls=_tls(observed, required),
            max_heap=int(float(limit) * _HEAP_SHARE) if limit else None,
        )
    )


def _tls(observed: ObservedEndpoint, required: EndpointRequirements) -> MutualTls | None:
    if required.tls_secret is None:
        return None
    server_name = f"{observed.key.name}.{observed.key.namespace}.svc"
    return MutualTls(TLS_DIRECTORY, _DIRECTORY, server_name)


def _secret_files(tls: MutualTls | None) -> dict[str, str]:
    files = tls.secret_files() if tls else {}
    return {name: json.dumps(content, indent=1, sort_keys=True) for name, content in files.items()}


def _template(
    observed: ObservedEndpoint,
    required: EndpointRequirements,
    settings: RouterSettings,
    bootstrap: str,
) -> Object:
    names, drain = Names(observed.key.name), math.ceil(required.drain_timeout)
    keys = [_api_keys(settings)] if required.api_key_secret else []
    spec = pod_spec(
        observed,
        settings,
        ENVOY,
        # Neither Envoy nor the drain program calls the Kubernetes API.
        automountServiceAccountToken=False,
        # Longer than the drain: SIGKILL would cut the streams that the drain waits for.
        terminationGracePeriodSeconds=drain + _GRACE_AFTER_DRAIN,
        initContainers=[*keys, _envoy(settings, has_keys=bool(keys), tls=required.tls_secret)],
        containers=[_drain(settings, drain)],
        volumes=[
            {"name": "config", "configMap": {"name": names.envoy}},
            *(_api_key_volumes(required.api_key_secret) if required.api_key_secret else ()),
            *tls_volumes(required.tls_secret),
        ],
    )
    annotations = {
        # Envoy reads its bootstrap once. A changed hash rolls the Deployment.
        labels.CONFIG_HASH: hashlib.sha256(bootstrap.encode()).hexdigest()[:16],
        "kubectl.kubernetes.io/default-container": ENVOY,
    }
    return {"metadata": {"annotations": annotations}, "spec": spec}


def _envoy(settings: RouterSettings, *, has_keys: bool, tls: str | None) -> Object:
    """Envoy as a native sidecar of the drain container, so that the kubelet stops Envoy last."""
    return container(
        settings,
        name=ENVOY,
        image=settings.envoy_image,
        restartPolicy="Always",
        command=["/usr/local/bin/envoy"],
        args=[
            *("-c", f"{_DIRECTORY}/{_FILE}"),
            *("--concurrency", str(settings.envoy_threads)),
            # While draining, close every connection after its response, not a growing random share.
            *("--drain-strategy", "immediate"),
            # Otherwise Envoy logs a line per request while no EPP answers; metrics count these.
            *("--component-log-level", "ext_proc:error"),
            "--disable-hot-restart",
        ],
        ports=[
            {"name": "http", "containerPort": ports.ENVOY, "protocol": "TCP"},
            {"name": "health", "containerPort": ports.ENVOY_HEALTH, "protocol": "TCP"},
        ],
        startupProbe=_STARTUP_PROBE,
        readinessProbe=_probe(READY, failures=2),
        livenessProbe=_probe(LIVE, failures=6),
        resources=dict(settings.envoy_resources),
        **{name: list(items) for name, items in settings.envoy_env.items()},
        volumeMounts=[
            {"name": "config", "mountPath": _DIRECTORY, "readOnly": True},
            *([{**_API_KEYS_MOUNT, "readOnly": True}] if has_keys else []),
            *tls_mounts(tls),
        ],
    )


def _api_key_volumes(secret: str) -> list[Object]:
    """The Secret, and the memory in which `api_keys` writes it down for Envoy."""
    return [
        api_key_volume(secret),
        {"name": "api-keys", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ]


def _api_keys(settings: RouterSettings) -> Object:
    """Writes the clients' keys for Envoy. Before Envoy, which does not start without the file."""
    command = ["python3", "-m", "tandem_operator.routing.api_keys"]
    check = ["python3", "-c", f"import os; os.stat({_API_KEY_FILE!r})"]
    return container(
        settings,
        name="api-keys",
        image=settings.tandem_image,
        restartPolicy="Always",
        command=[*command, API_KEY_DIRECTORY, _API_KEY_FILE],
        # The kubelet starts Envoy once this has succeeded.
        startupProbe={"exec": {"command": check}, "periodSeconds": 1, "failureThreshold": 60},
        resources={
            "requests": {"cpu": "5m", "memory": "24Mi"},
            "limits": {"memory": "128Mi"},
        },
        volumeMounts=[
            dict(API_KEY_MOUNT),
            dict(_API_KEYS_MOUNT),
        ],
    )


def _drain(settings: RouterSettings, seconds: int) -> Object:
    return container(
        settings,
        name="drain",
        image=settings.tandem_image,
        command=["python3", "-m", "tandem_operator.routing.router_drain", str(seconds)],
        resources={
            "requests": {"cpu": "5m", "memory": "24Mi"},
            "limits": {"memory": "128Mi"},
        },
    )


def _probe(path: str, *, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": ports.ENVOY_HEALTH},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }
