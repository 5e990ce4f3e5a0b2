"""Envoy's configuration as gateways write it for an InferencePool, in place of the operator's.

Each function changes the operator's bootstrap so that ext_proc, the picker's cluster and the pods'
cluster have the settings of one gateway, read in its source:

    istio              pilot/pkg/xds/filters/filters.go, pilot/pkg/networking/core/route/route.go
                       and cluster_builder.go, 1.31
    envoy_ai_gateway   internal/extensionserver/inferencepool.go and post_cluster_modify.go, 1.1
    kgateway           internal/kgateway/extensions2/plugins/inferenceextension/endpointpicker of
                       2.0, the last that serves InferencePools with Envoy in this way

agentgateway is no Envoy: `agentgateway.py`.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from tandem_contract import headers as wire
from tandem_operator.routing.envoy.clusters import EPP, FALLBACK, PICKED, TYPE, Json
from tests.epp.real import Backend

_DUPLEX: Final = {
    "request_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_header_mode": "SEND",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "response_trailer_mode": "SEND",
}
_BUFFERED: Final = _DUPLEX | {"request_body_mode": "BUFFERED", "response_body_mode": "BUFFERED"}
_LB: Final = {"untyped": [wire.METADATA_NAMESPACE]}


@dataclass
class GatewayConfig:
    """What differs between gateways. Called with the bootstrap, it changes it."""

    mode: Json
    """`processing_mode`."""
    timeout: str
    """`message_timeout`."""
    failure_mode_allow: bool
    metadata_options: Json | None
    overrides_host: bool
    """Whether the picked endpoint overrides a load balancer's choice; False: it is taken as
    original destination."""

    def __call__(self, bootstrap: Json, decode: list[Backend]) -> None:
        """Change `bootstrap`; `decode` are the pool's pods."""
        (listener,) = bootstrap["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        # No gateway removes the headers of clients before the picker does.
        manager.pop("early_header_mutation_extensions", None)
        (ext_proc,) = [f for f in manager["http_filters"] if f["name"].endswith("ext_proc")]
        # Copies, because a test may change the bootstrap further.
        ext_proc["typed_config"] = {
            "@type": ext_proc["typed_config"]["@type"],
            "grpc_service": {"envoy_grpc": {"cluster_name": EPP}},
            "processing_mode": deepcopy(self.mode),
            "message_timeout": self.timeout,
            "failure_mode_allow": self.failure_mode_allow,
        }
        if self.metadata_options is not None:
            ext_proc["typed_config"]["metadata_options"] = deepcopy(self.metadata_options)
        manager["http_filters"] = [ext_proc, manager["http_filters"][-1]]
        clusters = {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}
        clusters[EPP]["transport_socket"] = deepcopy(_UNVERIFIED)
        clusters[EPP].pop("health_checks", None)
        name = FALLBACK if self.overrides_host else PICKED
        if self.overrides_host:
            _override_host(clusters[FALLBACK])
        manager["route_config"] = _all_to(name, manager["route_config"])


_UNVERIFIED: Final = {
    "name": "envoy.transport_sockets.tls",
    "typed_config": {
        "@type": TYPE + "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"validation_context": {}},
    },
}
"""TLS that accepts any certificate."""


def _all_to(cluster: str, routes: Json) -> Json:
    """One route, to `cluster`."""
    host = {"name": "all", "domains": ["*"]}
    action = {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}
    return {"name": routes["name"], "virtual_hosts": [host | {"routes": [action]}]}


def _override_host(cluster: Json) -> None:
    """The endpoint in the picker's metadata, if it is in the cluster."""
    fallback = TYPE + "extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    policy: Any = {
        "@type": TYPE + "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": _key(wire.DESTINATION_ENDPOINT)}],
        "selected_host_key": _key(wire.SERVED_ENDPOINT),
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": fallback},
                    }
                }
            ]
        },
    }
    cluster.pop("lb_policy")
    cluster["load_balancing_policy"] = {
        "policies": [
            {
                "typed_extension_config": {
                    "name": "envoy.load_balancing_policies.override_host",
                    "typed_config": policy,
                }
            }
        ]
    }


def _key(name: str) -> Json:
    return {"key": wire.METADATA_NAMESPACE, "path": [{"key": name}]}


ISTIO: Final = GatewayConfig(
    _DUPLEX,
    "1000s",
    failure_mode_allow=True,
    metadata_options={"receiving_namespaces": _LB, "forwarding_namespaces": _LB},
    overrides_host=True,
)
"""With failureMode FailOpen."""
ENVOY_AI_GATEWAY: Final = GatewayConfig(
    _DUPLEX, "300s", failure_mode_allow=False, metadata_options=None, overrides_host=False
)
ENVOY_AI_GATEWAY_BUFFERED: Final = GatewayConfig(
    _BUFFERED, "300s", failure_mode_allow=False, metadata_options=None, overrides_host=False
)
"""With the annotation aigateway.envoyproxy.io/processing-body-mode: buffered."""
KGATEWAY: Final = GatewayConfig(
    {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    },
    "5s",
    failure_mode_allow=False,
    metadata_options=None,
    overrides_host=False,
)
