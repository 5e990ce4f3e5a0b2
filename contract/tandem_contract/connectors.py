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
    """A pool may name it; the sidecar cannot hand off with it yet."""
    P2P_NCCL = "p2p-nccl"
    """A pool may name it; the sidecar cannot hand off with it yet."""
    STORAGE = "storage"
    """A pool may name it; the sidecar cannot hand off with it yet."""
