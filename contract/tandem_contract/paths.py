"""The four routing paths of a request, backend roles, and error phases."""

from enum import StrEnum


class RoutingPath(StrEnum):
    """Value of the header `headers.ROUTING_PATH` and of the metrics' label `routing_path`."""

    FAST_DECODE = "fast_decode"
    """The decode pod already has the KV of the prompt, except at most its last partial blocks."""
    PREFILL_THEN_DECODE = "prefill_then_decode"
    """A prefill pod computes the prompt, its KV is transferred, the decode pod generates: that is
    faster, or the configuration prescribes it."""
    UNIFIED = "unified"
    """One engine does both, because no split is configured or because it is not worth its cost."""
    FALLBACK = "fallback"
    """A split was planned but not possible; one engine served the request."""


class Role(StrEnum):
    """Which phases a backend serves; `unified` serves both."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"

    def serves(self, phase: "Role") -> bool:
        """Whether a backend of this role may run `phase`."""
        return self is Role.UNIFIED or self is phase


class ErrorPhase(StrEnum):
    """Value of the label `phase` of `disaggregated_errors_total`."""

    PREFILL = "prefill"
    DECODE = "decode"
    KV_TRANSFER = "kv_transfer"
    ORCHESTRATION = "orchestration"
