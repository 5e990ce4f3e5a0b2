"""Names of the KV connectors: `transfer.connector` of a pool and `--connector` of the sidecar."""

from enum import StrEnum
from typing import Final

LEASE_DURATION: Final = "kv_lease_duration"
"""Setting of nixl in `kv_connector_extra_config`: seconds that a prefill engine holds KV for its
reader. Written by the operator and by users, read by engines."""
BACKENDS: Final = "backends"
"""Setting of nixl: the backends of NIXL, in order. Written from `transfer.backends`; the torch
engine accepts it without effect."""
TORCH_NIXL_SETTINGS: Final = (BACKENDS, LEASE_DURATION)
"""All settings of nixl that the torch engine accepts; it does not start with another one. Read by
the operator."""


class ConnectorName(StrEnum):
    """How KV moves from the prefill engine to the decode engine."""

    NIXL = "nixl"
    """vLLM's NixlConnector: decode pulls."""
    NIXL_PUSH = "nixl-push"
    """vLLM's NixlPushConnector: prefill pushes."""
    OFFLOADING = "offloading"
    """vLLM's OffloadingConnector with its peer-to-peer tier. It also keeps KV in host memory."""
    MOONCAKE = "mooncake"
    """vLLM's MooncakeConnector."""
    MULTI = "multi"
    """vLLM's MultiConnector, NIXL first."""
    LMCACHE = "lmcache"
    """vLLM's LMCacheConnectorV1: both engines use a store of LMCache."""
    LMCACHE_MP = "lmcache-mp"
    """vLLM's LMCacheMPConnector: both engines use LMCache's server on their node."""
    P2P_NCCL = "p2p-nccl"
    """The operator refuses it: vLLM removed the connector."""
    STORAGE = "storage"
    """Tandem's own: the prefill engine stores the KV, the decode engine loads it from the store."""
