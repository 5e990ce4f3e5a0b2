"""The router's objects, where it is the front in place of Envoy and EPP: `routing.front`. Pure.

It decides as the EPP does and has the EPP's settings: configuration, image, variables, replicas,
and the account that may read pods. Replicas and resources may be its own (`RouterSettings`).
"""

import math
from typing import Final

from tandem_contract import endpoints, ports

from ...pods import probes
from ...pods.containers import tls_flags
from ..endpoint.observed import ObservedEndpoint
from ..endpoint.requirements import EndpointRequirements
from ..endpoint.settings import RouterSettings
from ..envoy.bootstrap import BODY_LIMIT
from .common import (
    API_KEY_DIRECTORY,
    API_KEY_MOUNT,
    ROUTER,
    Names,
    Object,
    api_key_volume,
    budget,
    config_map,
    container,
    deployment,
    pod_spec,
    service,
)
from .epp import (
    CONFIG_DIRECTORY,
    CONFIG_FILE,
    KEY_DIRECTORY,
    decision_config,
    decision_mounts,
    decision_volumes,
    probe,
)

_DRAIN_DELAY: Final = 5
"""Seconds after SIGTERM for which a pod serves new requests: its removal from the endpoints of its
Service reaches all nodes late (as `router_drain.SETTLE`)."""
_GRACE_AFTER_DRAIN: Final = 15
"""Seconds between the end of a drain and SIGKILL."""


def router_objects(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> list[Object]:
    """All of the router's objects except those that an EPP has, too: keys and account.

    The router reloads its configuration, so a changed ConfigMap starts no new pods.
    """
    names = Names(observed.key.name)
    document = decision_config(required, settings)
    return [
        # Unready pods too: a new router gets the others' knowledge before it gets requests.
        service(
            observed,
            names.router_peers,
            ROUTER,
            ("peers", ports.EPP_PEERS),
            headless=True,
            unready=True,
        ),
        config_map(observed, names.router, ROUTER, {CONFIG_FILE: document}),
        deployment(
            observed,
            names.router,
            ROUTER,
            required.epp_replicas or settings.router_replicas or settings.epp_replicas,
            _template(observed, required, settings),
            stated=required.pod_metadata,
        ),
        budget(observed, names.router, ROUTER),
    ]


def _template(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings
) -> Object:
    names, drain = Names(observed.key.name), math.ceil(required.drain_timeout)
    spec = pod_spec(
        observed,
        settings,
        ROUTER,
        serviceAccountName=names.epp,
        automountServiceAccountToken=True,
        # Longer than delay and drain: SIGKILL would cut the streams that the drain waits for.
        terminationGracePeriodSeconds=_DRAIN_DELAY + drain + _GRACE_AFTER_DRAIN,
        containers=[_container(observed, required, settings, drain)],
        volumes=[
            *decision_volumes(observed, required, names.router),
            *([api_key_volume(secret)] if (secret := required.api_key_secret) else []),
        ],
    )
    return {"spec": spec}


def _container(
    observed: ObservedEndpoint, required: EndpointRequirements, settings: RouterSettings, drain: int
) -> Object:
    name, namespace = observed.key.name, observed.key.namespace
    asks_for_keys = required.api_key_secret is not None
    return container(
        settings,
        name=ROUTER,
        image=settings.tandem_image,
        command=["tandem-router"],
        args=[
            *("--discovery", "kubernetes"),
            *("--namespace", namespace),
            *("--endpoint", name),
            *("--config", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}"),
            *("--plan-key-dir", KEY_DIRECTORY),
            *("--peers", f"{Names(name).router_peers}.{namespace}.svc:{ports.EPP_PEERS}"),
            *tls_flags(required.tls_secret),
            *(("--api-key-dir", API_KEY_DIRECTORY) if asks_for_keys else ()),
            *("--max-body", str(required.max_request_bytes or BODY_LIMIT)),
            *("--drain-delay", f"{_DRAIN_DELAY}s"),
            *("--drain-timeout", f"{drain}s"),
        ],
        ports=[
            {"name": "http", "containerPort": ports.ROUTER, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ports.ROUTER_ADMIN, "protocol": "TCP"},
            {"name": "peers", "containerPort": ports.EPP_PEERS, "protocol": "TCP"},
        ],
        startupProbe=probes.server_startup(endpoints.ALIVE, ports.ROUTER_ADMIN),
        readinessProbe=probe(endpoints.READY, ports.ROUTER_ADMIN, failures=2),
        livenessProbe=probe(endpoints.ALIVE, ports.ROUTER_ADMIN, failures=6),
        resources=dict(settings.router_resources),
        **{name: list(items) for name, items in settings.epp_env.items()},
        volumeMounts=[
            *decision_mounts(required),
            *([dict(API_KEY_MOUNT)] if asks_for_keys else []),
        ],
    )
