"""HTTP paths that one component serves and another asks for; who serves and who asks is said."""

from typing import Final

HEALTH: Final = "/health"
"""Every engine → probes: 200 once it can take requests."""

READY: Final = "/readyz"
"""Sidecar admin → readiness probe: 200 while it takes new requests and its engine is healthy."""

DRAIN_AND_WAIT: Final = "/drain?wait=true"
"""Sidecar admin → the engine container's preStop: take nothing new, answer when all is done."""

EPP_READY: Final = "/readyz"
"""EPP health → readiness probe: 200 once it knows its backends and until it stops."""

EPP_LIVE: Final = "/healthz"
"""EPP health → liveness probe: 200 while its loop runs."""
