"""Environment variables two components share: the operator writes them, engines read them."""

from typing import Final

SIDE_CHANNEL_HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
"""Address readers of this engine's KV are told to connect to (vLLM's name)."""

SIDE_CHANNEL_PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
"""Its port; `ports.SIDE_CHANNEL` when absent."""
