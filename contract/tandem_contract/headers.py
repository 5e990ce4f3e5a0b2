"""Every HTTP header that Tandem writes or reads, in lower case as HTTP/2 requires.

Each docstring says which component writes the header and which reads it. A client cannot set any
header of `INTERNAL`: Envoy removes inbound copies, and the EPP and the sidecar remove them again.
"""

from typing import Final

DESTINATION_ENDPOINT: Final = "x-gateway-destination-endpoint"
"""EPP → Envoy: `ip:port`, or an ordered comma-separated list (Gateway API Inference Extension)."""

ALTERNATE_ENDPOINT: Final = "x-tandem-alternate-endpoint"
"""EPP → Tandem's Envoy and sidecar: `ip:port` of the pod that Envoy asks if the one of
`DESTINATION_ENDPOINT` takes nothing of the request. Absent where there is no other."""

NOT_SENT: Final = "x-tandem-not-sent"
"""sidecar → Tandem's Envoy, `1`, on an error: no byte of the request went to the engine, so the pod
of `ALTERNATE_ENDPOINT` may serve it. Envoy removes it."""

PREFILLER_HOST_PORT: Final = "x-prefiller-host-port"
"""EPP → sidecar: ordered, comma-separated prefill candidates, the chosen one first (llm-d's
name)."""

PLAN: Final = "x-tandem-plan"
"""EPP → sidecar: the signed routing decision, see `tandem_contract.plan`."""

TIMING: Final = "x-tandem-timing"
"""engine → sidecar → EPP: durations and token counts known when the response headers are sent, see
`tandem_contract.timing`.

The client does not receive it: the EPP removes it, or the sidecar if no EPP routed the request.
"""

READS_STREAMS: Final = "x-tandem-reads-streams"
"""decode engine → sidecar, `1`: the engine can read KV while a prefill engine computes it. Engines
without it get the decode leg after the prefill's answer. The sidecar removes it."""

KV_CONTRADICTED: Final = "x-tandem-kv-contradicted"
"""decode engine → sidecar, `1`, with a 400: the KV that the request names is of another prompt. The
sidecar, which named it, sends the request once more without."""

ROUTING_PATH: Final = "x-continuum-routing-path"
"""sidecar → client: a `RoutingPath` value, on errors too."""

PREFILL_BACKEND: Final = "x-continuum-prefill-backend"
"""sidecar → client: name of the backend that ran the prefill; absent without a prefill leg."""

DECODE_BACKEND: Final = "x-continuum-decode-backend"
"""sidecar → client: name of the backend that decoded."""

REQUEST_ID: Final = "x-request-id"
"""All components: one id through EPP, sidecar and logs. Each attempt sends the
engines a new id derived from it."""

RESUMED: Final = "x-tandem-resumed"
"""Client → what keeps its stream, a sidecar or the router: asks with any value that each usage of
the stream has a member `tandem_resumed`, how often another engine went on with it so far."""

TRACEPARENT: Final = "traceparent"
"""All components: W3C trace context."""

RETRY_AFTER: Final = "retry-after"
"""engine → sidecar → client: seconds to wait, or a date to wait for, before a retry (RFC 9110)."""

SHOULD_RETRY: Final = "x-should-retry"
"""sidecar → client, `false`: the request may have hung the engine that got it, and would hang the
next. The SDKs of OpenAI and Anthropic, which retry other errors with a 5xx, obey it."""

REQUEST_DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
"""EPP → client, on errors that are not the client's fault: why no pod got the request, in
llm-d-router's words: `rejected-no-endpoints`, `rejected-saturated`, `rejected-internal`."""

DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""sidecar → vLLM, by the plan: the data-parallel rank that serves a leg. EPP → vLLM directly where
the pod has no sidecar; a sidecar drops it. Clients may not set it."""

DATA_PARALLEL_HOST_PORT: Final = "x-data-parallel-host-port"
"""llm-d's EPP → sidecar: `ip:port` of the data-parallel rank that serves a request which was sent
to the port of rank 0. Tandem's EPP names the rank in the plan."""

ENCODER_HOSTS_PORTS: Final = "x-encoder-hosts-ports"
"""llm-d's EPP → its sidecar: pods that encode media. Tandem's sidecar drops it: the pod that
prefills encodes."""

KV_CACHE_SOURCE: Final = "x-kv-cache-source-host-port"
"""llm-d's EPP → its sidecar: a pod to pull cached KV from. Tandem's sidecar drops it."""

SERVED_ENDPOINT: Final = "x-gateway-destination-endpoint-served"
"""Gateway → EPP, a key of `METADATA_NAMESPACE` in the response's metadata: `ip:port` of the backend
that served, one of those that the EPP named (Gateway API Inference Extension). Some gateways also
send a header of this name; clients may not."""

MODEL_REWRITE: Final = "x-llm-d-model-name-rewrite"
"""Client or gateway → EPP: the model that is to serve the request instead of the one in the body;
the EPP removes it."""

MODEL_REWRITE_OLDER: Final = "x-gateway-model-name-rewrite"
"""Its older name."""

MODEL_REWRITES: Final = (MODEL_REWRITE, MODEL_REWRITE_OLDER)
"""Both names, the one that counts first."""

OBJECTIVE: Final = "x-llm-d-inference-objective"
"""Client or gateway → EPP: the name of the InferenceObjective that has the request's priority."""

OBJECTIVE_OLDER: Final = "x-gateway-inference-objective"
"""Its older name."""

OBJECTIVES: Final = (OBJECTIVE, OBJECTIVE_OLDER)
"""Both names, the one that counts first."""

TTFT_TARGETS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
"""Client → EPP: milliseconds until the first token that it asks for. llm-d's name, then its older
one. Plugins that choose by predicted latencies read it, and flow control in the order `ttft`."""

ITL_TARGETS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""The same for the time between two tokens, for these plugins."""

FAIRNESS: Final = "x-llm-d-inference-fairness-id"
"""Client or gateway → EPP: the tenant, which flow control gives its share."""

FAIRNESS_OLDER: Final = "x-gateway-inference-fairness-id"
"""Its older name."""

QUEUE_TTL: Final = "x-llm-d-inference-ttl"
"""Client or gateway → EPP: how long the request may wait in flow control at most, as Go writes
durations; it only makes the time shorter that the configuration gives."""

TEST_SELECTION: Final = "test-epp-endpoint-selection"
"""Client → EPP, in conformance tests of gateways: the endpoints that it may choose, `IP` or
`IP:port`, with commas. All without the header."""

TEST_SERVED: Final = "x-conformance-test-served-endpoint"
"""EPP → client, in conformance tests of gateways: the endpoint that served, as the gateway told
the EPP."""

PREFILL_PROOF: Final = "x-tandem-prefill-proof"
"""Decode pod's sidecar → unified pod's sidecar: proves that a request is the prefill leg of a
hand-off (`plan.prove_prefill`), so that it may keep its kv_transfer_params."""

CLIENT: Final = "x-tandem-client"
"""Envoy → EPP: the client whose API key the request has, by its name in the Secret. The EPP forms a
`cache_salt` of it if `cache_salt.from_header` says so, and removes it."""

INTERNAL: Final = frozenset(
    {
        CLIENT,
        DESTINATION_ENDPOINT,
        ALTERNATE_ENDPOINT,
        NOT_SENT,
        PREFILLER_HOST_PORT,
        PLAN,
        PREFILL_PROOF,
        TIMING,
        ROUTING_PATH,
        PREFILL_BACKEND,
        DECODE_BACKEND,
        DATA_PARALLEL_RANK,
        SERVED_ENDPOINT,
        DATA_PARALLEL_HOST_PORT,
        ENCODER_HOSTS_PORTS,
        KV_CACHE_SOURCE,
    }
)
"""Removed from every client request."""

METADATA_NAMESPACE: Final = "envoy.lb"
"""Dynamic metadata namespace of the endpoint pick and of the subset hint."""

SUBSET_HINT: Final = "subset_hint"
"""Envoy → EPP, a key of `METADATA_NAMESPACE`: allowed candidates, a comma list of `ip:port`."""

SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
"""Envoy → EPP: the metadata namespace in which an inference gateway sends the same hint."""

SUBSET_KEY: Final = "x-gateway-destination-endpoint-subset"
"""The hint's key in `SUBSET_NAMESPACE` (Gateway API Inference Extension)."""

UPSTREAM_ADDRESS: Final = "upstream.address"
"""Envoy → EPP, an attribute of the response: `ip:port` of the backend that Envoy connected to."""

CODE_DETAILS: Final = "response.code_details"
"""Envoy → EPP, an attribute of the response: `via_upstream`, or why Envoy answered itself."""
