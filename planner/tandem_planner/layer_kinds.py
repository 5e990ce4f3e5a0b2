"""What each layer of a model keeps in the KV cache."""

from dataclasses import dataclass
from enum import StrEnum

from .model_config import ModelConfig


class LayerKind(StrEnum):
    """How a layer looks at the tokens before."""

    FULL = "full"
    """Keys and values of every token."""
    WINDOW = "window"
    """Keys and values of the latest `window` tokens only."""
    STATE = "state"
    """A state of constant size (Mamba, linear attention, convolution): nothing per token."""


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """The number of layers of each kind."""

    full: int
    window: int = 0
    state: int = 0


_KINDS = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "global": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "sliding_window": LayerKind.WINDOW,
    "chunked_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.STATE,
    "mamba": LayerKind.STATE,
    "mamba2": LayerKind.STATE,
    "conv": LayerKind.STATE,
    "recurrent": LayerKind.STATE,
    "moe": None,
    "mlp": None,
    "-": None,
    "E": None,
    "*": LayerKind.FULL,
    "M": LayerKind.STATE,
}
"""Names in `layer_types`, `layers_block_type` and `hybrid_override_pattern` of config.json; None: a
layer without a cache. Unknown names count as full attention, the safe side."""


def layer_counts(config: ModelConfig) -> LayerCounts:
    """The layers of `config` by kind."""
    if names := config.layer_names:
        kinds = [_KINDS.get(name, LayerKind.FULL) for name in names]
        return LayerCounts(
            kinds.count(LayerKind.FULL),
            kinds.count(LayerKind.WINDOW),
            kinds.count(LayerKind.STATE),
        )
    return LayerCounts(config.layers)
