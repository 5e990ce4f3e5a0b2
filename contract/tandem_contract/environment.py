"""Environment variables that the operator sets and engines read."""

from typing import Final

SIDE_CHANNEL_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""Address at which decode engines connect to this engine to read its KV (vLLM's name)."""

DATA_PORTS: Final = "UCX_TCP_PORT_RANGE"
"""`FIRST-LAST`: the TCP ports at which UCX takes connections of other engines (UCX's name). Without
the variable the kernel chooses them."""

SIDE_CHANNEL_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Port of the same; `ports.SIDE_CHANNEL` when the variable is not set."""
