"""Every HTTP header Tandem writes or reads, lower case as HTTP/2 wants them.

Each line says who writes it and who reads it. Clients can set none of `INTERNAL`: Envoy drops
inbound copies, and the EPP and the sidecar drop them again.
"""

from typing import Final

DESTINATION_ENDPOINT: Final = "x-gateway-destination-endpoint"
"""EPP → Envoy: `ip:port`, a comma list is ordered (Gateway API Inference Extension)."""

PREFILLER_HOST_PORT: Final = "x-prefiller-host-port"
"""EPP → sidecar: ordered prefill candidates, comma list; the first is the choice (llm-d's name)."""

PLAN: Final = "x-tandem-plan"
"""EPP → sidecar: the signed decision, see `tandem_contract.plan`."""

TIMING: Final = "x-tandem-timing"
"""engine → sidecar → EPP: what is known when response headers go, see `tandem_contract.timing`.

Removed before the client: by the sidecar when nothing routed the request, by the EPP otherwise.
"""

ROUTING_PATH: Final = "x-continuum-routing-path"
"""sidecar → client: a `RoutingPath` value, on errors too."""

PREFILL_BACKEND: Final = "x-continuum-prefill-backend"
"""sidecar → client: name of the backend that ran the prefill; absent when none did."""

DECODE_BACKEND: Final = "x-continuum-decode-backend"
"""sidecar → client: name of the backend that decoded."""

REQUEST_ID: Final = "x-request-id"
"""all: one id through EPP, sidecar, engines and logs; the engines get one per attempt from it."""

TRACEPARENT: Final = "traceparent"
"""all: W3C trace context, passed on."""

RETRY_AFTER: Final = "retry-after"
"""engine → sidecar → client: seconds, or a date, until when not to ask again (RFC 9110)."""

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""router → vLLM: which data-parallel rank serves a leg. Not a client's to set."""

INTERNAL: Final = frozenset(
    {
        DESTINATION_ENDPOINT,
        PREFILLER_HOST_PORT,
        PLAN,
        TIMING,
        ROUTING_PATH,
        PREFILL_BACKEND,
        DECODE_BACKEND,
        DATA_PARALLEL_RANK,
        "x-gateway-destination-endpoint-served",
        "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port",
        "x-data-parallel-host-port",
    }
)
"""Dropped from every client request (PROTOCOLS: what clients may not say)."""

METADATA_NAMESPACE: Final = "envoy.lb"
"""Dynamic metadata namespace of the endpoint pick and of the subset hint."""

SUBSET_HINT: Final = "subset_hint"
"""Envoy → EPP, below `METADATA_NAMESPACE`: the candidates it allows, comma list of `ip:port`."""

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
"""Envoy → EPP: the metadata namespace in which an inference gateway puts the same hint."""

SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
"""The hint's key below `SUBSET_NAMESPACE` (Gateway API Inference Extension)."""
