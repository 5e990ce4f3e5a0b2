"""Standard ports. On one machine every pod has an address of its own, so these hold there too."""

from typing import Final

ENVOY: Final = 8080
"""What clients connect to."""
SIDECAR: Final = 8000
"""Serving port of a decode pod: the sidecar."""
SIDECAR_ADMIN: Final = 8001
"""`/metrics`, `/readyz`, `/drain`, `/state` of the sidecar."""
ENGINE_PREFILL: Final = 8000
"""Serving port of a prefill pod: the engine itself."""
ENGINE_DECODE: Final = 8200
"""The engine behind the sidecar on a decode pod."""
SIDE_CHANNEL: Final = 5600
"""KV hand-off side channel, plus the data-parallel rank."""
KV_EVENTS: Final = 5557
"""KV events over ZMQ, plus the data-parallel rank."""
KV_EVENTS_REPLAY: Final = 5657
"""Missed KV events asked for again, plus the data-parallel rank."""
MOONCAKE_BOOTSTRAP: Final = 8998
"""Mooncake's registry of a prefill pod's ranks (vLLM's default)."""
OFFLOADING_P2P: Final = 7777
"""Peer-to-peer tier of OffloadingConnector, plus the data-parallel rank (vLLM's default)."""
EPP_GRPC: Final = 9002
EPP_HEALTH: Final = 9003
EPP_METRICS: Final = 9090
ENVOY_ADMIN: Final = 9901
"""Loopback: whoever reaches it can stop Envoy."""
ENVOY_HEALTH: Final = 9902
"""`/ready` and `/stats/prometheus` of Envoy, and nothing that changes it."""
