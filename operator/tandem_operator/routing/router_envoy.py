"""Envoy in a cluster: its Deployment, its bootstrap, what clients connect to. Pure."""

import hashlib
import json
import math
from typing import Any, Final

from tandem_contract import labels, ports

from ..planning.drift import quantity
from .envoy import EnvoySettings, envoy_bootstrap
from .envoy_guards import LIVE, READY
from .router_objects import (
    Names,
    Object,
    budget,
    config_map,
    container,
    deployment,
    pod_spec,
    service,
)
from .router_observed import ObservedEndpoint, RouterSettings
from .router_wants import Wants

ENVOY: Final = "envoy"
"""Component and container."""

_DIRECTORY: Final = "/etc/envoy"
_FILE: Final = "envoy.json"
_GRACE: Final = 15
"""Seconds between the end of a drain and the kill."""
_HEAP_SHARE: Final = 0.85
"""Of the memory limit: threads, code and what the allocator keeps are not in Envoy's heap."""


def envoy_objects(
    observed: ObservedEndpoint, wants: Wants, settings: RouterSettings
) -> list[Object]:
    """All of Envoy's; the Services before the pods that look their names up."""
    names = Names(observed.key.name)
    bootstrap = json.dumps(_bootstrap(observed, wants, settings), indent=1, sort_keys=True)
    decode = {labels.endpoint_label(observed.key.name): "decode"}
    return [
        service(observed, names.endpoint, ENVOY, ("http", ports.ENVOY)),
        service(
            observed, names.decode, "decode", ("http", ports.SIDECAR), pods=decode, headless=True
        ),
        config_map(observed, names.envoy, ENVOY, {_FILE: bootstrap}),
        deployment(
            observed,
            names.envoy,
            ENVOY,
            settings.envoy_replicas,
            _template(observed, wants, settings, bootstrap),
        ),
        budget(observed, names.envoy, ENVOY),
    ]


def _bootstrap(
    observed: ObservedEndpoint, wants: Wants, settings: RouterSettings
) -> dict[str, Any]:
    names, namespace = Names(observed.key.name), observed.key.namespace
    # Our own are reached one by one, so that each has its share of streams. Another's EPP is
    # whatever a Service of the EPP's name leads to; until there is one, Envoy balances plainly.
    epp = names.epp_pods if wants.epp else names.epp
    limit = quantity(settings.envoy_resources.get("limits", {}).get("memory", ""))
    return envoy_bootstrap(
        EnvoySettings(
            epp_address=f"{epp}.{namespace}.svc",
            fallback=(f"{names.decode}.{namespace}.svc:{ports.SIDECAR}",),
            # Inference gateways stream bodies both ways, and an EPP made for them knows no other.
            body_mode="BUFFERED" if wants.epp else "FULL_DUPLEX_STREAMED",
            response_bodies=not wants.epp,
            health_port=ports.ENVOY_HEALTH,
            max_heap=int(float(limit) * _HEAP_SHARE) if limit else None,
        )
    )


def _template(
    observed: ObservedEndpoint, wants: Wants, settings: RouterSettings, bootstrap: str
) -> Object:
    names, drain = Names(observed.key.name), math.ceil(wants.drain)
    spec = pod_spec(
        observed,
        settings,
        ENVOY,
        automountServiceAccountToken=False,
        terminationGracePeriodSeconds=drain + _GRACE,
        initContainers=[_envoy(settings)],
        containers=[_drain(settings, drain)],
        volumes=[{"name": "config", "configMap": {"name": names.envoy}}],
    )
    annotations = {
        labels.CONFIG_HASH: hashlib.sha256(bootstrap.encode()).hexdigest()[:16],
        "kubectl.kubernetes.io/default-container": ENVOY,
    }
    return {"metadata": {"annotations": annotations}, "spec": spec}


def _envoy(settings: RouterSettings) -> Object:
    """A native sidecar of what drains it: kubelet stops it last."""
    return container(
        settings,
        name=ENVOY,
        image=settings.envoy_image,
        restartPolicy="Always",
        command=["/usr/local/bin/envoy"],
        args=[
            *("-c", f"{_DIRECTORY}/{_FILE}"),
            *("--concurrency", str(settings.envoy_threads)),
            # What asks clients to move on does so at once, and not for some of them at random.
            *("--drain-strategy", "immediate"),
            # Otherwise a line for each request while no EPP is there; figures count them.
            *("--component-log-level", "ext_proc:error"),
            "--disable-hot-restart",
        ],
        ports=[
            {"name": "http", "containerPort": ports.ENVOY, "protocol": "TCP"},
            {"name": "health", "containerPort": ports.ENVOY_HEALTH, "protocol": "TCP"},
        ],
        readinessProbe=_probe(READY, failures=2),
        livenessProbe=_probe(LIVE, failures=6),
        resources=dict(settings.envoy_resources),
        volumeMounts=[{"name": "config", "mountPath": _DIRECTORY, "readOnly": True}],
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
