"""HTTP paths that one component serves and another asks for; who serves and who asks is said."""

from typing import Final

HEALTH: Final = "/health"
"""Every engine → probes: 200 once it can take requests."""

READY: Final = "/readyz"
"""Readiness, on the sidecar's admin port (it takes new requests and its engine is healthy) and on
the health ports of EPP (it knows its backends) and operator (its connection works)."""

LIVE: Final = "/healthz"
"""Liveness, on the health ports of EPP and operator: 200 while the loop runs."""

ALIVE: Final = "/livez"
"""Liveness, on the sidecar's admin port: 200 while the loop runs, draining or not."""

METRICS: Final = "/metrics"
"""Every component, in Prometheus' text format."""

STATE: Final = "/state"
"""Sidecar admin → people, tests: what runs, as JSON."""

DRAIN: Final = "/drain"
"""Sidecar admin, GET or POST: take nothing new."""

DRAIN_AND_WAIT: Final = f"{DRAIN}?wait=true"
"""Sidecar admin → the engine container's preStop: take nothing new, answer when all is done."""

REQUESTS: Final = "/requests/"
"""With a request id behind it, on the sidecar's admin port and the EPP's metrics port →
`tandem trace`: what is remembered of that request, see `tandem_contract.trace`."""
