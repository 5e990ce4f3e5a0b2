"""When a silent backend counts as stalled, in Envoy's access log and in the EPP."""

from typing import Final

STALL_SECONDS: Final = 60.0
"""Seconds without a sign of work, or without a byte, after which a request that ends may count as
stalled. The operator has Envoy log clients that leave later than that, and the EPP judges. Shorter:
impatient clients accuse pods with long queues. Longer than clients wait: never counted."""
