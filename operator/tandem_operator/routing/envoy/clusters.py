"""The upstream clusters of Envoy's bootstrap, between which the routes choose. Pure.

picked     the address in the header that the EPP set
alternate  the address in the EPP's second header, for a request of which the first took nothing
decode     any decode pod; serves while no EPP answers
epp        the EPP pods; each request's gRPC stream goes to the least busy one
admin      Envoy's own admin port, for its metrics

With `MutualTls` all but the last are called by TLS, and both sides show a certificate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import headers as wire
from tandem_contract import server_tls
from tandem_contract.commandline import parse_host_port

Json = dict[str, Any]

TYPE: Final = "type.googleapis.com/envoy."
"""Prefix of every `@type`, the name of an Envoy protobuf message."""

PICKED: Final = "picked"
ALTERNATE: Final = "alternate"
FALLBACK: Final = "decode"
EPP: Final = "epp"
ADMIN: Final = "admin"

_HTTP: Final = "http/1.1"
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
            # By default 3 at a time, where all requests of a pod that just died are sent again.
            "max_retries": _UNLIMITED,
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


CERTIFICATE_FILE: Final = "tls-certificate.json"
AUTHORITIES_FILE: Final = "tls-authorities.json"


@dataclass(frozen=True)
class MutualTls:
    """TLS to EPP and sidecars. Envoy reads the certificates anew when their directory changes."""

    directory: str
    """Of ca.crt, tls.crt and tls.key."""
    config_directory: str
    """Of the files that `secret_files` returns."""
    server_name: str
    """The DNS name that certificates of EPP and sidecars must have."""

    def secret_files(self) -> dict[str, Json]:
        """File name → content: where Envoy finds the certificates. Only secrets that it discovers
        are read again."""
        watched = {"path": self.directory}
        certificate = {
            "certificate_chain": {"filename": f"{self.directory}/{server_tls.CERTIFICATE}"},
            "private_key": {"filename": f"{self.directory}/{server_tls.KEY}"},
            "watched_directory": watched,
        }
        validation = {
            "trusted_ca": {"filename": f"{self.directory}/{server_tls.AUTHORITIES}"},
            "watched_directory": watched,
            "match_typed_subject_alt_names": [
                {"san_type": "DNS", "matcher": {"exact": self.server_name}}
            ],
        }
        secrets = {
            CERTIFICATE_FILE: {"name": "certificate", "tls_certificate": certificate},
            AUTHORITIES_FILE: {"name": "authorities", "validation_context": validation},
        }
        secret_type = TYPE + "extensions.transport_sockets.tls.v3.Secret"
        return {
            file: {"resources": [{"@type": secret_type, **secret}]}
            for file, secret in secrets.items()
        }

    def transport_socket(self, protocol: str) -> Json:
        """`protocol`: for ALPN."""
        context = {
            "alpn_protocols": [protocol],
            "tls_certificate_sds_secret_configs": [self._secret("certificate", CERTIFICATE_FILE)],
            "validation_context_sds_secret_config": self._secret("authorities", AUTHORITIES_FILE),
        }
        return {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "sni": self.server_name,
                "common_tls_context": context,
            },
        }

    def _secret(self, name: str, file: str) -> Json:
        source = {"path": f"{self.config_directory}/{file}"}
        return {
            "name": name,
            "sds_config": {"path_config_source": source, "resource_api_version": "V3"},
        }


def _transport(tls: MutualTls | None, protocol: str) -> Json:
    return {"transport_socket": tls.transport_socket(protocol)} if tls else {}


def picked_clusters(tls: MutualTls | None) -> list[Json]:
    """They send each request to the address in a header that the EPP set."""
    # ORIGINAL_DST accepts exactly one address in the header and answers 503 to a comma-separated
    # list (Envoy 1.40), so the alternate has a header and a cluster of its own. The override-host
    # policy takes a list, but accepts only hosts of its cluster; a pod that has just started is not
    # one yet.
    return [
        _header_cluster(PICKED, wire.DESTINATION_ENDPOINT, tls),
        _header_cluster(ALTERNATE, wire.ALTERNATE_ENDPOINT, tls),
    ]


def _header_cluster(name: str, header: str, tls: MutualTls | None) -> Json:
    return {
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": _CONNECT_TIMEOUT,
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER,
        "original_dst_lb_config": {
            "use_http_header": True,
            "http_header_name": header,
        },
        **_transport(tls, _HTTP),
        "upstream_connection_options": _KEEPALIVE,
        "circuit_breakers": _NO_CIRCUIT_BREAKER,
    }


def fallback_cluster(addresses: Sequence[str], tls: MutualTls | None) -> Json:
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
        **_transport(tls, _HTTP),
        "upstream_connection_options": _KEEPALIVE,
        "circuit_breakers": _NO_CIRCUIT_BREAKER,
    }


def epp_cluster(address: str, port: int, tls: MutualTls | None) -> Json:
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
        **_transport(tls, "h2"),
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
