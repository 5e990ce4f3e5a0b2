"""Envoy's bootstrap configuration, as the operator's ConfigMap and the local runner use it. Pure.

    client ─► drop internal headers ─► ext_proc (EPP) ─► route: the EPP picked a pod ─► that pod
                │                  │                        which takes nothing       ─► another
                │                  │                      route: it did not           ─► any decode
                └─► no API key:    └─► route: no path of the API ─► 404
                    401, if asked for

The last route serves requests while no EPP answers: `failure_mode_allow` lets a request pass
without a pick, and Envoy balances it over the decode pods.
"""

from dataclasses import dataclass, field
from typing import Final

from tandem_contract import ports
from tandem_contract.api_paths import ApiPaths

from .clusters import (
    ADMIN,
    CONNECTION_BUFFER,
    TYPE,
    Json,
    MutualTls,
    admin_cluster,
    epp_cluster,
    fallback_cluster,
    picked_clusters,
    socket_address,
)
from .http_filters import (
    EXT_PROC,
    ROUTER,
    BodyMode,
    api_key_auth,
    broken_answer_log,
    drop_answer_headers,
    drop_internal_headers,
    error_replies,
    ext_proc,
    extension_filter,
    routes,
)

READY: Final = "/ready"
"""Path on the health port: 503 once Envoy was told to fail its health checks, as when it drains."""
LIVE: Final = "/live"
"""Path on the health port: 200 while Envoy answers at all."""
STATS: Final = "/stats/prometheus"
"""Path on the health port: Envoy's metrics."""

_STREAM_IDLE_TIMEOUT: Final = "1800s"
"""Longest time without a byte on a stream. A queued prompt sends nothing for minutes, but a stream
whose peer has vanished must end eventually."""
_HEADERS_TIMEOUT: Final = "30s"
"""Longest time a client may take to send its headers."""
_REQUEST_TIMEOUT: Final = "300s"
"""Longest time a client may take to send its whole request: enough for 16 MiB over a slow line."""
_MANAGER: Final = (
    TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
)


BODY_LIMIT: Final = 16 << 20
"""Bytes of a request's body where no pool says it, as in EPP and sidecar. Envoy holds a body whole
while the EPP reads it: too high, and few clients fill the memory of its container."""


@dataclass(frozen=True)
class EnvoySettings:
    """Settings that differ between Envoys."""

    epp_address: str
    fallback: tuple[str, ...]
    """`host:port` of the decode pods' sidecars, or of a headless Service that resolves to them; at
    least one."""
    epp_port: int = ports.EPP_GRPC
    listen_address: str = "0.0.0.0"
    listen_port: int = ports.ENVOY
    admin_address: str = "127.0.0.1"
    """The admin port can stop Envoy and has no authentication: keep it on loopback."""
    admin_port: int = ports.ENVOY_ADMIN
    body_mode: BodyMode = "BUFFERED"
    """BUFFERED needs fewer ext_proc messages, and a response in progress survives a killed EPP.
    FULL_DUPLEX_STREAMED holds no body in Envoy, but Envoy 1.40 then resets such a response."""
    response_bodies: bool = False
    """Whether Envoy sends response bodies to the EPP. Ours does not need them; one made for
    inference gateways counts a request as running until it has seen the last byte."""
    reports_broken_answers: bool = True
    """Whether Envoy tells the EPP which answers broke off. Other EPPs than ours have no such
    service."""
    body_limit: int = BODY_LIMIT
    """Largest request body in bytes that Envoy buffers in BUFFERED mode; larger ones get 413. In
    the other mode the EPP's --max-body limits them."""
    needs_epp: bool = False
    """Whether requests that no EPP has answered get 503 instead of any decode pod: without the EPP
    they have no salt of their tenant."""
    api: ApiPaths = field(default_factory=ApiPaths)
    """The paths that clients may request; others get 404."""
    api_key_file: str | None = None
    """File with the API keys of clients, see `routing.api_keys`; None: clients need no key."""
    tls: MutualTls | None = None
    """TLS to EPP and sidecars; None: clear text."""
    access_log: bool = False
    """One line per request on stdout."""
    health_port: int | None = None
    """Port of the listener for probes and Prometheus; None: no such listener."""
    max_connections: int = 20_000
    """Most client connections at a time; Envoy closes further ones at once. Each connection may
    carry a stream, which takes another two file descriptors."""
    max_heap: int | None = None
    """Heap limit in bytes; at 95% of it Envoy answers new requests with 503. None: no limit."""


def envoy_bootstrap(settings: EnvoySettings) -> Json:
    """The bootstrap configuration, to be written as JSON or YAML.

    Raises ValueError when there is no fallback address or one is not `host:port`.
    """
    if not settings.fallback:
        raise ValueError("Envoy needs at least one decode address to fall back to")
    # The health listener serves Prometheus by proxying to the admin port, hence its cluster.
    health, admin = [], []
    if settings.health_port is not None:
        health.append(_health_listener(settings.listen_address, settings.health_port))
        admin.append(admin_cluster(settings.admin_address, settings.admin_port))
    # Envoy reads no further file without a name of its own; nothing reads the name.
    reads_files = settings.api_key_file or settings.tls
    named: Json = {"node": {"id": "tandem", "cluster": "tandem"}} if reads_files else {}
    return {
        **named,
        "admin": {"address": socket_address(settings.admin_address, settings.admin_port)},
        "static_resources": {
            "listeners": [_client_listener(settings), *health],
            "clusters": [
                *picked_clusters(settings.tls),
                fallback_cluster(settings.fallback, settings.tls),
                epp_cluster(settings.epp_address, settings.epp_port, settings.tls),
                *admin,
            ],
        },
        "overload_manager": _overload_manager(settings.max_connections, settings.max_heap),
    }


def _client_listener(settings: EnvoySettings) -> Json:
    return {
        "name": "clients",
        "address": socket_address(settings.listen_address, settings.listen_port),
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "filter_chains": [
            {
                "filters": [
                    extension_filter(
                        "network.http_connection_manager", _connection_manager(settings)
                    )
                ]
            }
        ],
    }


def _connection_manager(settings: EnvoySettings) -> Json:
    manager: Json = {
        "@type": _MANAGER,
        # `router_drain` reads http.clients.downstream_rq_active, which is named after this prefix.
        "stat_prefix": "clients",
        # Old load testers and health checkers send HTTP/1.0, mostly without a Host header.
        "http_protocol_options": {"accept_http_10": True, "default_host_for_http_10": "tandem"},
        "use_remote_address": True,
        "stream_idle_timeout": _STREAM_IDLE_TIMEOUT,
        "request_headers_timeout": _HEADERS_TIMEOUT,
        "request_timeout": _REQUEST_TIMEOUT,
        # Client, EPP, sidecar and logs share one request id, which the response repeats. An id that
        # the client sent stays unchanged; by default the extension packs its tracing decision into
        # a client's UUID.
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": TYPE + "extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            }
        },
        # Runs before all filters and route matching, so a client's header can never select a pod.
        "early_header_mutation_extensions": [drop_internal_headers()],
        "local_reply_config": {"mappers": error_replies(buffered=settings.body_mode == "BUFFERED")},
        "route_config": routes(settings.body_limit, settings.api),
        "http_filters": [
            extension_filter("http.header_mutation", drop_answer_headers()),
            # Before the EPP, which spends nothing on a request that is refused.
            *([api_key_auth(settings.api_key_file)] if settings.api_key_file else []),
            extension_filter(
                EXT_PROC,
                ext_proc(
                    settings.body_mode, settings.response_bodies, needs_epp=settings.needs_epp
                ),
            ),
            ROUTER,
        ],
    }
    manager["access_log"] = []
    if settings.access_log:
        stdout = TYPE + "extensions.access_loggers.stream.v3.StdoutAccessLog"
        manager["access_log"].append(
            {"name": "envoy.access_loggers.stdout", "typed_config": {"@type": stdout}}
        )
    if settings.reports_broken_answers:
        manager["access_log"].append(broken_answer_log())
    return manager


def _health_listener(address: str, port: int) -> Json:
    """Serves READY, LIVE and STATS, and no path that changes Envoy."""
    check = {
        "@type": TYPE + "extensions.filters.http.health_check.v3.HealthCheck",
        # Envoy itself answers READY, with 503 after the /healthcheck/fail of `router_drain`.
        "pass_through_mode": False,
        "headers": [{"name": ":path", "string_match": {"exact": READY}}],
    }
    paths = [
        {"match": {"path": LIVE}, "direct_response": {"status": 200}},
        {"match": {"path": STATS}, "route": {"cluster": ADMIN}},
    ]
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "health",
        "route_config": {
            "name": "health",
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": paths}],
        },
        "http_filters": [extension_filter("http.health_check", check), ROUTER],
    }
    return {
        "name": "health",
        "address": socket_address(address, port),
        # Probes must succeed even when clients use up all connections or the heap.
        "ignore_global_conn_limit": True,
        "bypass_overload_manager": True,
        "filter_chains": [
            {"filters": [extension_filter("network.http_connection_manager", manager)]}
        ],
    }


def _overload_manager(max_connections: int, max_heap: int | None) -> Json:
    """Refuses connections and requests before memory or file descriptors run out.

    An Envoy that is killed for its memory cuts every stream, so refusing some requests is better.
    """
    monitors = [
        _resource_monitor(
            "global_downstream_max_connections",
            "downstream_connections.v3.DownstreamConnectionsConfig",
            {"max_active_downstream_connections": max_connections},
        )
    ]
    if max_heap is None:
        return {"resource_monitors": monitors}
    monitors.append(
        _resource_monitor(
            "fixed_heap",
            "fixed_heap.v3.FixedHeapConfig",
            {"max_heap_size_bytes": max_heap},
        )
    )
    # Free memory is returned to the system first; requests are refused if that is not enough.
    actions = {"shrink_heap": 0.85, "stop_accepting_requests": 0.95}
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": monitors,
        "actions": [
            {
                "name": f"envoy.overload_actions.{action}",
                "triggers": [
                    {
                        "name": "envoy.resource_monitors.fixed_heap",
                        "threshold": {"value": share},
                    }
                ],
            }
            for action, share in actions.items()
        ],
    }


def _resource_monitor(name: str, kind: str, config: Json) -> Json:
    typed = {"@type": f"{TYPE}extensions.resource_monitors.{kind}", **config}
    return {"name": f"envoy.resource_monitors.{name}", "typed_config": typed}
