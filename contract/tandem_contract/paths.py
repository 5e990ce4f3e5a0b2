"""The four ways a request can be served, and the phases an error can fall in."""

from enum import StrEnum


class RoutingPath(StrEnum):
    """Value of the routing-path header and of the metrics' `routing_path` label (seed 000)."""

    FAST_DECODE = "fast_decode"
    """The decode pod holds the prompt's KV but for at most the last partial blocks."""
    PREFILL_THEN_DECODE = "prefill_then_decode"
    """Prefill on a prefill pod, KV moved, decode on the decode pod."""
    UNIFIED = "unified"
    """One engine does both: nothing disaggregated is configured, or the split is not worth it."""
    FALLBACK = "fallback"
    """A split was wanted and was not possible: served without it."""


class Role(StrEnum):
    """What a backend may be asked for (seed 000); `unified` is always eligible."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"

    def serves(self, phase: "Role") -> bool:
        """Whether a backend of this role may run `phase`."""
        return self is Role.UNIFIED or self is phase


class ErrorPhase(StrEnum):
    """Label `phase` of `disaggregated_errors_total` (seed 000)."""

    PREFILL = "prefill"
    DECODE = "decode"
    KV_TRANSFER = "kv_transfer"
    ORCHESTRATION = "orchestration"
