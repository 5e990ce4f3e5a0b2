"""What loading a part of a prompt from external storage takes, and whether it pays. Pure.

    load     = latency + bytes of the loaded tokens × seconds per byte
    it pays  if load ≤ MAX_LOAD_SHARE × prefill of the same tokens

Engines decide by the same rule, each with what it measured itself, so a request never costs more
than if its prompt were computed. Latency and rate are learned per store (`transfer.TransferFit`).
"""

from typing import Final, NamedTuple

from .cost import PodFigures
from .fabrics import FABRICS, Fabric
from .transfer import TransferCost

STORAGE_PRIOR: Final = TransferCost(0.02, 1.0 / FABRICS[Fabric.TCP].assumed)
"""Assumed before a load is measured: two round trips to an object store of 10 ms each, then
10 Gbit/s Ethernet."""
MAX_LOAD_SHARE: Final = 0.5
"""Longest load, as a share of the prefill that it saves: the engines' own deadline for loads.
Higher: requests are sent where the engine computes in spite of what storage has."""
CHUNK_TOKENS: Final = 256
"""Tokens at a prompt's end that storage does not have where it has all full chunks: the engines'
default size of a chunk."""


class Load(NamedTuple):
    """What one pod would load of a prompt."""

    tokens: int = 0
    """Beyond those that are cached on the pod."""
    seconds: float = 0.0


NO_LOAD: Final = Load()


def worthwhile_load(
    pod: PodFigures, cost: TransferCost, token_bytes: float, cached: int, stored: int
) -> Load:
    """What `pod`, which has the first `cached` tokens of a prompt, loads of the first `stored` ones
    that its store has. `cost`: of the store; `token_bytes`: KV bytes per token there. NO_LOAD where
    computing them is not slow enough."""
    tokens = stored - cached
    if tokens <= 0:
        return NO_LOAD
    seconds = cost.seconds(tokens * token_bytes)
    computing = tokens * (pod.per_token + pod.per_pair * (tokens + 2 * cached))
    return Load(tokens, seconds) if seconds <= MAX_LOAD_SHARE * computing else NO_LOAD


def is_served_from_storage(prompt: int, cached: int, load: Load) -> bool:
    """Whether a pod that has `cached` tokens of a prompt of `prompt` tokens needs no prefill beside
    `load`: at most a chunk is left to compute, and less than half of the prompt."""
    rest = prompt - cached - load.tokens
    return load.tokens > 0 and rest <= CHUNK_TOKENS and 2 * rest < prompt
