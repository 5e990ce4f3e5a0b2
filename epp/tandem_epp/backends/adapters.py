"""LoRA adapters of an engine: which are in use, and which its slots probably hold. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """LoRA adapters as the engine's metrics report them."""

    running: frozenset[str] = frozenset()
    """Adapters of running requests: each occupies a slot."""
    waiting: frozenset[str] = frozenset()
    """Adapters of waiting requests."""
    slots: int = 0
    """Adapters that the engine can hold on the GPU at once (`--max-loras`)."""
