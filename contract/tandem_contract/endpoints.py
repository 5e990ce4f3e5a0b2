"""HTTP paths that one component serves and another asks for; who serves and who asks is said."""

from typing import Final

HEALTH: Final = "/health"
"""Every engine → probes: 200 once it can take requests."""

READY: Final = "/readyz"
"""Readiness, on the sidecar's admin port (it takes new requests and its engine is healthy) and on
the health ports of EPP (it knows its backends) and operator (its connection works)."""

LIVE: Final = "/healthz"
"""Liveness, on the health ports of EPP and operator: 200 while the loop runs."""

DRAIN_AND_WAIT: Final = "/drain?wait=true"
"""Sidecar admin → the engine container's preStop: take nothing new, answer when all is done."""

REQUESTS: Final = "/requests/"
"""With a request id behind it, on the sidecar's admin port and the EPP's metrics port →
`tandem trace`: what is remembered of that request, see `tandem_contract.trace`."""
