"""The upstream clusters of Envoy's bootstrap, between which the routes choose. Pure.

picked     the address in the header that the EPP set
decode     any decode pod; serves while no EPP answers
epp        the EPP pods; each request's gRPC stream goes to the least busy one
admin      Envoy's own admin port, for its metrics
"""

from collections.abc import Sequence
from typing import Any, Final

from tandem_contract import headers as wire
from tandem_contract.commandline import parse_host_port

Json = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."
"""Prefix of every `@type`, the name of an Envoy protobuf message."""

PICKED: Final = "picked"
FALLBACK: Final = "decode"
EPP: Final = "epp"
ADMIN: Final = "admin"

_CONNECT_TIMEOUT: Final = "2s"
CONNECTION_BUFFER: Final = 1 << 20
"""Bytes that Envoy buffers per connection and direction before it stops reading from the sender."""

_UNLIMITED: Final = 1 << 20
_NO_CIRCUIT_BREAKER: Final[Json] = {
    # Envoy's default limit of 1,024 concurrent requests would turn many long responses into 503s.
    "thresholds": [
        {
            "max_connections": _UNLIMITED,
            "max_pending_requests": _UNLIMITED,
            "max_requests": _UNLIMITED,
        }
    ]
}
_KEEPALIVE: Final[Json] = {
    # A pod sends nothing for minutes while a prompt is queued, and so does one whose node vanished.
    # TCP keepalive tells them apart within about a minute.
    "tcp_keepalive": {"keepalive_time": 30, "keepalive_interval": 10, "keepalive_probes": 3}
}
_DNS: Final[Json] = {
    "name": "envoy.clusters.dns",
    "typed_config": {
        "@type": TYPE + "extensions.clusters.dns.v3.DnsCluster",
        "dns_lookup_family": "V4_PREFERRED",
        # Ignore the TTL, or Envoy would keep using pods that are gone. A name without addresses is
        # no error: no pod is ready yet, or the pools enable no EPP.
        "dns_refresh_rate": "2s",
        "respect_dns_ttl": False,
    },
}
"""A cluster type that resolves a name and balances over all its addresses."""


def picked_cluster() -> Json:
    """Sends each request to the address in the header that the EPP set."""
    # ORIGINAL_DST accepts exactly one address in the header and answers 503 to a comma-separated
    # list (Envoy 1.40), so our EPP names one by default. Alternates would need the override-host
    # policy, which accepts only hosts of its cluster; a pod that has just started is not one yet.
    return {
        "name": PICKED,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": _CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": wire.DESTINATION_ENDPOINT,
        },
        "upstream_connection_options": _KEEPALIVE,
        "circuit_breakers": _NO_CIRCUIT_BREAKER,
    }


def fallback_cluster(addresses: Sequence[str]) -> Json:
    """Balances over `addresses`, each `host:port`; a name counts once per address it resolves to.

    Raises ValueError when one is not `host:port`.
    """
    return {
        "name": FALLBACK,
        "cluster_type": _DNS,
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": _CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "load_assignment": _endpoints(
            FALLBACK, [socket_address(*parse_host_port(address)) for address in addresses]
        ),
        "upstream_connection_options": _KEEPALIVE,
        "circuit_breakers": _NO_CIRCUIT_BREAKER,
    }


def epp_cluster(address: str, port: int) -> Json:
    """The EPP pods behind a DNS name."""
    options = TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": EPP,
        "cluster_type": _DNS,
        # A stream lasts as long as its request, so the least busy EPP pod has the fewest.
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": _CONNECT_TIMEOUT,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _endpoints(EPP, [socket_address(address, port)]),
        # Health checks remove a dead EPP from the cluster. Without a healthy host the stream fails
        # before Envoy sends a body on it, so that even a FULL_DUPLEX_STREAMED request can pass
        # without a pick instead of failing.
        "health_checks": [
            {
                "tcp_health_check": {},
                "interval": "1s",
                "no_traffic_interval": "1s",
                "timeout": "1s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
            }
        ],
        # Until the next check a dead EPP is the least busy one. So the first connection that fails
        # removes it, too; a check that succeeds brings it back.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 1,
            "enforcing_consecutive_local_origin_failure": 100,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "max_ejection_percent": 100,
            "base_ejection_time": "2s",
            "interval": "1s",
        },
        # 0 turns panic mode off, in which Envoy would also use EPPs that fail their checks.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "upstream_connection_options": _KEEPALIVE,
        "circuit_breakers": _NO_CIRCUIT_BREAKER,
    }


def admin_cluster(address: str, port: int) -> Json:
    """Envoy's admin port, from which the health listener proxies its metrics."""
    return {
        "name": ADMIN,
        "type": "STATIC",
        "connect_timeout": _CONNECT_TIMEOUT,
        "load_assignment": _endpoints(ADMIN, [socket_address(address, port)]),
    }


def socket_address(host: str, port: int) -> Json:
    """An `Address` message."""
    return {"socket_address": {"address": host, "port_value": port}}


def _endpoints(cluster: str, sockets: Sequence[Json]) -> Json:
    endpoints = [{"endpoint": {"address": address}} for address in sockets]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
