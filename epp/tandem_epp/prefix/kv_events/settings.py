"""Settings of the precise prefix index."""

from dataclasses import dataclass

from tandem_contract import ports

from ..pod_blocks import MAX_BYTES


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Where engines publish their events, and how much memory the index may take."""

    port: int = ports.KV_EVENTS
    """Port on a pod's address, plus the data-parallel rank."""
    replay_port: int = ports.KV_EVENTS_REPLAY
    """Port of the replay, plus the data-parallel rank."""
    topic: str = ""
    """Prefix of the topics to receive; empty: all."""
    max_bytes: int = MAX_BYTES
    """Bytes of the index, over all pods. Too low: a part of the blocks is not indexed, and prompts
    go to pods that have less of them."""
