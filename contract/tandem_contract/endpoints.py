"""HTTP paths that one component serves and another requests, with both named for each."""

from typing import Final

HEALTH: Final = "/health"
"""Served by every engine, for probes: 200 once it accepts requests."""

READY: Final = "/readyz"
"""Readiness: on the sidecar's admin port (it accepts requests and its engine is healthy), on the
EPP's health port (it knows its backends) and on the operator's (its API connection works)."""

READY_OR_STARTING: Final = f"{READY}?starting=true"
"""The same for the kubelet, on the sidecar's admin port: 200 also while the engine has not been
healthy yet. The pod is not ready then by the engine's own startup probe."""

LIVE: Final = "/healthz"
"""Liveness, on the health ports of EPP and operator: 200 while the event loop runs."""

GRPC_READINESS: Final = "readiness"
"""Service name of gRPC's health service, on the EPP's health port and its ext_proc port: as READY.
llm-d's charts probe it, and GRPC_LIVENESS, where there are several replicas."""

GRPC_LIVENESS: Final = "liveness"
"""Service name of gRPC's health service, on the same ports: as LIVE."""

GRPC_EPP: Final = "inference-extension"
"""Service name of gRPC's health service, on the same ports: as READY. llm-d's charts probe it for
both liveness and readiness of a single replica, as the Gateway API Inference Extension's do."""

ALIVE: Final = "/livez"
"""Liveness, on the sidecar's admin port: 200 while the event loop runs, also while it drains."""

MODELS: Final = "/v1/models"
"""Every engine → clients, EPP, `tandem doctor`: the models that it serves, as OpenAI's list."""

METRICS: Final = "/metrics"
"""Served by every component, in Prometheus' text format."""

STATE: Final = "/state"
"""On the sidecar's admin port, for people: requests in progress, as JSON."""

DRAIN: Final = "/drain"
"""On the Unix socket DRAIN_SOCKET, POST: accept no new requests. On the admin port it is 403."""

DRAIN_AND_WAIT: Final = f"{DRAIN}?wait=true"
"""The same for the engine container's preStop hook: answers once no request needs the engine
any more."""

DRAIN_SOCKET: Final = "tandem-drain/{host}/{port}"
"""Name of the Unix socket, in Linux's abstract namespace, of a sidecar or router whose admin port
is `host:port`. Each container of its pod reaches it, and no other pod, also not through a mesh."""

DEBUG_DECISIONS: Final = "/debug/decisions"
"""On the EPP's metrics port, for people: the latest decisions, or with `?request_id=ID` those for
one request, each candidate's predicted cost and what then happened; see `tandem_contract.trace`."""

DEBUG_PODS: Final = "/debug/pods"
"""On the EPP's metrics port, for people and `tandem doctor`: what the EPP knows and estimates of
each pod, see `tandem_contract.pod_reports`."""

REQUESTS: Final = "/requests/"
"""Followed by a request id, on the sidecar's admin port and the EPP's metrics port, for `tandem
trace`: the record of that request, see `tandem_contract.trace`."""
