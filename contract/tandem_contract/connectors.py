"""Names of the KV connectors: `transfer.connector` of a pool and `--connector` of the sidecar."""

from enum import StrEnum


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
    """vLLM's LMCacheConnectorV1. The sidecar cannot hand off with it: only users' own can."""
    P2P_NCCL = "p2p-nccl"
    """The operator refuses it: vLLM removed the connector."""
    STORAGE = "storage"
    """The operator refuses it: not in this release."""
