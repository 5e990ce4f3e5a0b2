"""How the Envoy of llm-d's standalone chart (0.10) calls the endpoint picker."""

from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_operator.routing.envoy.clusters import TYPE, Json


def call_as_the_chart_does(cluster: Json) -> None:
    """Change the operator's cluster of the picker: TLS that verifies nothing, and a gRPC health
    check of which a failure leaves the picker in use."""
    # The chart leaves these at Envoy's defaults.
    for setting in ("outlier_detection", "common_lb_config"):
        del cluster[setting]
    cluster["health_checks"] = [
        {
            "timeout": "2s",
            "interval": "10s",
            "unhealthy_threshold": 3,
            "healthy_threshold": 2,
            "reuse_connection": True,
            "grpc_health_check": {"service_name": SERVICE},
            # Only these connections offer HTTP/2 by ALPN; those of requests offer nothing.
            "tls_options": {"alpn_protocols": ["h2"]},
        }
    ]
    cluster["transport_socket"] = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"validation_context": {}},
        },
    }
