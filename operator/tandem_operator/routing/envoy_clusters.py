"""Where Envoy sends things, as clusters of its bootstrap: `envoy` says when to use which.

picked     the address that the EPP's header names        admin   Envoy's own admin port
decode     any decode pod: what serves when no EPP answers
epp        the pickers, each request's stream on the least busy one
"""

from collections.abc import Sequence
from typing import Final

from tandem_contract import headers as wire
from tandem_contract.commandline import parse_host_port

from .envoy_parts import TYPE, Json, socket

PICKED: Final = "picked"
FALLBACK: Final = "decode"
EPP: Final = "epp"
ADMIN: Final = "admin"

_CONNECT_TIMEOUT: Final = "2s"
CONNECTION_BUFFER: Final = 1 << 20
"""Bytes buffered per connection and direction before the sender is slowed down."""

_MANY: Final = 1 << 20
_NO_BREAKER: Final[Json] = {
    # Envoy's default of 1,024 requests at a time would turn a burst of long answers into 503s.
    "thresholds": [{"max_connections": _MANY, "max_pending_requests": _MANY, "max_requests": _MANY}]
}
_ALIVE: Final[Json] = {
    # A prompt in a queue says nothing for minutes; a node that vanished says nothing for ever. This
    # tells them apart in about a minute.
    "tcp_keepalive": {"keepalive_time": 30, "keepalive_interval": 10, "keepalive_probes": 3}
}
_DNS: Final[Json] = {
    "name": "envoy.clusters.dns",
    "typed_config": {
        "@type": TYPE + "extensions.clusters.dns.v3.DnsCluster",
        "dns_lookup_family": "V4_PREFERRED",
        # Not by the answer's TTL: a pod that is gone must be so here. A name that does not resolve
        # is no error: no pod is ready yet, or no EPP is wanted.
        "dns_refresh_rate": "2s",
        "respect_dns_ttl": False,
    },
}
"""Every address of a name, each a host."""


def picked_cluster() -> Json:
    """One address per request, from the EPP's header."""
    # ORIGINAL_DST takes exactly one address from the header and answers 503 to a comma list (seen
    # with Envoy 1.40), so our EPP names one unless told otherwise. Alternates would need the
    # override-host policy, which knows only hosts of its cluster, and a new pod is none yet.
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
        "upstream_connection_options": _ALIVE,
        "circuit_breakers": _NO_BREAKER,
    }


def fallback_cluster(addresses: Sequence[str]) -> Json:
    """All of `addresses`, each `host:port` and as many hosts as its name has addresses.

    Raises ValueError when one is not `host:port`.
    """
    return {
        "name": FALLBACK,
        "cluster_type": _DNS,
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": _CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "load_assignment": _endpoints(
            FALLBACK, [socket(*parse_host_port(address)) for address in addresses]
        ),
        "upstream_connection_options": _ALIVE,
        "circuit_breakers": _NO_BREAKER,
    }


def epp_cluster(address: str, port: int) -> Json:
    """The pickers behind a name."""
    options = TYPE + "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": EPP,
        "cluster_type": _DNS,
        # A stream lasts as long as its request, so the least busy picker has the fewest of them.
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": _CONNECT_TIMEOUT,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _endpoints(EPP, [socket(address, port)]),
        # A dead EPP must be known to be dead: without a host to try, a stream fails before a body
        # is sent on it, and a FULL_DUPLEX_STREAMED request passes unpicked instead of failing.
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
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "upstream_connection_options": _ALIVE,
        "circuit_breakers": _NO_BREAKER,
    }


def admin_cluster(address: str, port: int) -> Json:
    """Envoy itself, for the figures that the health listener shows."""
    return {
        "name": ADMIN,
        "type": "STATIC",
        "connect_timeout": _CONNECT_TIMEOUT,
        "load_assignment": _endpoints(ADMIN, [socket(address, port)]),
    }


def _endpoints(cluster: str, sockets: Sequence[Json]) -> Json:
    endpoints = [{"endpoint": {"address": address}} for address in sockets]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}
