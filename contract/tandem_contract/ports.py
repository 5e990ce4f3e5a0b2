"""Standard ports. `tandem up` gives each local pod its own address, so they are used there too."""

from typing import Final

LAST: Final = 65_535
"""The largest port number."""
ENVOY: Final = 8080
"""Envoy's listener for clients."""
SIDECAR: Final = 8000
"""The sidecar: serving port of a decode pod."""
SIDECAR_ADMIN: Final = 8001
"""The sidecar's `/metrics`, `/readyz` and `/state`."""
ENGINE_PREFILL: Final = 8000
"""The engine of a prefill pod: its serving port."""
ENGINE_DECODE: Final = 8200
"""The engine behind the sidecar on a decode pod."""
SIDE_CHANNEL: Final = 5600
"""KV hand-off side channel, plus the data-parallel rank."""
KV_EVENTS: Final = 5557
"""KV events over ZMQ, plus the data-parallel rank."""
KV_EVENTS_REPLAY: Final = 5657
"""Replay of missed KV events, plus the data-parallel rank."""
MOONCAKE_BOOTSTRAP: Final = 8998
"""Mooncake's bootstrap server of a prefill pod (vLLM's default)."""
OFFLOADING_P2P: Final = 7777
"""Peer-to-peer tier of OffloadingConnector, plus the data-parallel rank (vLLM's default)."""
LMCACHE_MP: Final = 5555
"""LMCache's server on a node, to which the node's engines connect (LMCache's default)."""
ROUTER: Final = 8080
"""`tandem-router`: clients connect to it as they would to Envoy."""
ROUTER_ADMIN: Final = 9090
"""Its `/metrics`, `/readyz`, `/state` and `/debug`."""
EPP_GRPC: Final = 9002
EPP_HEALTH: Final = 9003
EPP_PEERS: Final = 9005
"""The other replicas of an EPP connect to it."""
EPP_METRICS: Final = 9090
OPERATOR_HEALTH: Final = 8081
"""The operator's `/healthz` and `/readyz`."""
OPERATOR_METRICS: Final = 9090
"""The operator's `/metrics`."""
ENVOY_ADMIN: Final = 9901
"""Envoy's admin interface. It listens on loopback only, because its clients can stop Envoy."""
ENVOY_HEALTH: Final = 9902
"""Envoy's `/ready` and `/stats/prometheus`, read-only."""
