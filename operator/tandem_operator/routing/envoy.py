"""Envoy's bootstrap configuration, as the operator's ConfigMap and the local runner write it.

    client ─► drop internal headers ─► ext_proc (EPP) ─► route: EPP named a pod ─► that address
                                                          route: it did not     ─► any decode pod

The second route serves when no EPP answers: `failure_mode_allow` lets the request pass without a
pick, and plain balancing over the decode pods takes over.
"""

import json
from dataclasses import dataclass
from typing import Final, Literal

from tandem_contract import headers as wire
from tandem_contract import ports
from tandem_contract.openai_errors import TYPES, error_body

from .envoy_clusters import (
    CONNECTION_BUFFER,
    EPP,
    FALLBACK,
    PICKED,
    admin_cluster,
    epp_cluster,
    fallback_cluster,
    picked_cluster,
)
from .envoy_guards import health_listener, overload
from .envoy_parts import MANAGER, ROUTER, TYPE, Json, named, socket

BodyMode = Literal["FULL_DUPLEX_STREAMED", "BUFFERED"]

_PICK_TIMEOUT: Final = "5s"
"""Longest wait for the EPP; a decision takes a millisecond. Past it the request goes unpicked."""
_SILENCE: Final = "1800s"
"""Longest time without a byte on a stream. A queued prompt says nothing for minutes; a connection
whose other end vanished must end some time."""
_HEADERS_TIMEOUT: Final = "30s"
_REQUEST_TIMEOUT: Final = "300s"
"""Longest a client may take to send its headers, and its whole request: 16 MiB over a bad line."""
_TOO_LARGE: Final = 413


@dataclass(frozen=True)
class EnvoySettings:
    """What differs from one Envoy to another."""

    epp_address: str
    fallback: tuple[str, ...]
    """`host:port` of the decode pods (their sidecars), or of a headless Service that resolves to
    them; at least one."""
    epp_port: int = ports.EPP_GRPC
    listen_address: str = "0.0.0.0"
    listen_port: int = ports.ENVOY
    admin_address: str = "127.0.0.1"
    """The admin port can stop Envoy: loopback unless something is in front of it."""
    admin_port: int = ports.ENVOY_ADMIN
    body_mode: BodyMode = "BUFFERED"
    """BUFFERED costs fewer messages, and an answer under way outlives an EPP that is killed; in
    FULL_DUPLEX_STREAMED mode Envoy 1.40 resets it. The latter holds no body in Envoy."""
    response_bodies: bool = False
    """Whether the EPP sees answers too. Ours does without; one made for inference gateways counts
    a request as running until it has seen its last byte."""
    body_limit: int = 16 << 20
    """Bytes of request body held in BUFFERED mode. The EPP's --max-body is the limit otherwise."""
    access_log: bool = False
    """One line per request on stdout."""
    health_port: int | None = None
    """For probes and for Prometheus; None: no such listener."""
    max_connections: int = 20_000
    """Clients' connections at a time; further ones are closed at once. Each may hold a stream, and
    a stream takes another two descriptors."""
    max_heap: int | None = None
    """Bytes Envoy may hold; near it, requests are answered with 503. None: no limit."""


def envoy_bootstrap(settings: EnvoySettings) -> Json:
    """The bootstrap configuration, to be written as JSON or YAML.

    Raises ValueError when there is no fallback address or one is not `host:port`.
    """
    if not settings.fallback:
        raise ValueError("Envoy needs at least one decode address to fall back to")
    health, admin = [], []
    if settings.health_port is not None:
        health.append(health_listener(settings.listen_address, settings.health_port))
        admin.append(admin_cluster(settings.admin_address, settings.admin_port))
    return {
        "admin": {"address": socket(settings.admin_address, settings.admin_port)},
        "static_resources": {
            "listeners": [_listener(settings), *health],
            "clusters": [
                picked_cluster(),
                fallback_cluster(settings.fallback),
                epp_cluster(settings.epp_address, settings.epp_port),
                *admin,
            ],
        },
        "overload_manager": overload(settings.max_connections, settings.max_heap),
    }


def _listener(settings: EnvoySettings) -> Json:
    return {
        "name": "clients",
        "address": socket(settings.listen_address, settings.listen_port),
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "filter_chains": [
            {"filters": [named("network.http_connection_manager", _manager(settings))]}
        ],
    }


def _manager(settings: EnvoySettings) -> Json:
    manager: Json = {
        "@type": MANAGER,
        "stat_prefix": "clients",
        "use_remote_address": True,
        "stream_idle_timeout": _SILENCE,
        "request_headers_timeout": _HEADERS_TIMEOUT,
        "request_timeout": _REQUEST_TIMEOUT,
        # One id for client, EPP, sidecar and logs: the client's own where it sent one, unchanged
        # (the extension otherwise writes its tracing decision into a client's UUID), and told.
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "request_id_extension": {
            "typed_config": {
                "@type": TYPE + "extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": False,
            }
        },
        # Before any filter and any route: nothing a client sends may name a pod.
        "early_header_mutation_extensions": [_drop_internal_headers()],
        "local_reply_config": {"mappers": _error_replies(settings)},
        "route_config": _routes(settings),
        "http_filters": [
            named("http.header_mutation", _drop_timing()),
            named("http.ext_proc", _ext_proc(settings)),
            ROUTER,
        ],
    }
    if settings.access_log:
        stdout = TYPE + "extensions.access_loggers.stream.v3.StdoutAccessLog"
        manager["access_log"] = [
            {"name": "envoy.access_loggers.stdout", "typed_config": {"@type": stdout}}
        ]
    return manager


def _drop_internal_headers() -> Json:
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": TYPE
            + "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": name} for name in sorted(wire.INTERNAL)],
        },
    }


def _drop_timing() -> Json:
    # Responses pass the filters from the last to the first: the EPP has read it by then, and
    # where the EPP has died meanwhile, nobody else takes it off.
    return {
        "@type": TYPE + "extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"response_mutations": [{"remove": wire.TIMING}]},
    }


def _error_replies(settings: EnvoySettings) -> list[Json]:
    """Envoy's own errors in OpenAI's shape, which those of the EPP have."""
    flagged: Json = {"response_flag_filter": {}}
    replies = [_error_reply(status, [flagged]) for status in sorted(TYPES)]
    if settings.body_mode == "BUFFERED":
        # Without a flag, as the EPP's are; but here the EPP sees no body that is too large.
        replies.append(_error_reply(_TOO_LARGE, []))
    return replies


def _error_reply(status: int, filters: list[Json]) -> Json:
    code = {"comparison": {"op": "EQ", "value": {"default_value": status, "runtime_key": "none"}}}
    every = [{"status_code_filter": code}, *filters]
    body = json.loads(error_body(status, "%LOCAL_REPLY_BODY%"))
    return {
        "filter": {"and_filter": {"filters": every}} if filters else every[0],
        "body_format_override": {"json_format": body},
    }


def _ext_proc(settings: EnvoySettings) -> Json:
    return {
        "@type": TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        # No timeout on the stream: it lives as long as the request.
        "grpc_service": {"envoy_grpc": {"cluster_name": EPP}, "timeout": "0s"},
        "failure_mode_allow": True,
        "message_timeout": _PICK_TIMEOUT,
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": settings.body_mode,
            # FULL_DUPLEX_STREAMED asks for them; they cost nothing where there are none.
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": "FULL_DUPLEX_STREAMED" if settings.response_bodies else "NONE",
            # Keeps the stream open to the response's end, which is how the EPP knows of it.
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {
            "receiving_namespaces": {"untyped": [wire.METADATA_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [wire.METADATA_NAMESPACE, wire.SUBSET_NAMESPACE]},
        },
    }


def _routes(settings: EnvoySettings) -> Json:
    picked = {"name": wire.DESTINATION_ENDPOINT, "present_match": True}
    return {
        "name": "routes",
        "virtual_hosts": [
            {
                "name": "all",
                "domains": ["*"],
                "request_body_buffer_limit": settings.body_limit,
                "routes": [
                    {
                        "match": {"prefix": "/", "headers": [picked]},
                        "route": _route(PICKED, _RETRY_UNSENT),
                    },
                    {"match": {"prefix": "/"}, "route": _route(FALLBACK, _RETRY_ELSEWHERE)},
                ],
            }
        ],
    }


_RETRY_UNSENT: Final[Json] = {
    # The same address again: only for a connection that could not be made or was refused before
    # the pod read anything. A 503 of the pod it chose is the EPP's to avoid, not to repeat.
    "retry_on": "connect-failure,refused-stream,reset-before-request",
    "num_retries": 1,
}
_RETRY_ELSEWHERE: Final[Json] = {
    # A sidecar that answers 503 has sent nothing on, so the request is safe on another.
    "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
    "retriable_status_codes": [503],
    "num_retries": 2,
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": {
                "@type": TYPE + "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
            },
        }
    ],
    "host_selection_retry_max_attempts": 5,
}


def _route(cluster: str, retry: Json) -> Json:
    # An answer takes as long as it takes: no route timeout; `_SILENCE` ends what died.
    return {"cluster": cluster, "timeout": "0s", "retry_policy": retry}
