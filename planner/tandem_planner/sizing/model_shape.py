"""What computing a model takes, from its config.json: parameters per token, experts, attention.

Errors: `UnknownModelConfig`: a field is missing, or the model has layers that are not modelled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tandem_planner.kv_size import element_bytes
from tandem_planner.layer_kinds import layer_counts
from tandem_planner.model_config import ModelConfig, UnknownModelConfig, model_config

_UNGATED: Final = frozenset({
    "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2",
})  # fmt: skip
"""Model types whose feed-forward layers have two matrices; all others have three (SwiGLU)."""
_QUANTIZED_BYTES: Final[Mapping[str, float]] = {
    "fp8": 1.0, "fbgemm_fp8": 1.0, "modelopt": 1.0, "mxfp4": 4.25 / 8, "int8": 1.0,
}  # fmt: skip
"""`quant_method` → bytes per element of the layers' matrices; the scales of mxfp4 are a quarter
bit per element (one byte per 32)."""
_EIGHT_BIT_FLOAT: Final = frozenset({"fp8", "fbgemm_fp8", "modelopt"})
_SCALE_BITS: Final = 0.25
"""Bits per element that the scales of 4-bit weights take: 2 bytes per 64 to 128."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts are of parameters, over all layers."""

    kv: ModelConfig
    hidden: int
    heads: int
    query_size: int
    """Elements of a query and key per head, when prompts are computed."""
    vocabulary: int
    widest: int
    """Elements of the widest intermediate result of a layer, per token."""
    dense: float
    """Parameters that every token uses: attention, feed-forward layers, shared experts."""
    experts: float
    """Parameters of all routed experts."""
    expert_count: int
    """Routed experts per layer that has any; 0: none."""
    experts_per_token: int
    is_tied: bool
    """Whether the embedding is the last layer too."""
    weight_bytes: float
    """Bytes per parameter of the layers' matrices."""
    is_fp8: bool
    """Whether the layers' matrices are multiplied in 8-bit floating point."""

    @property
    def parameters(self) -> float:
        """All of them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return self.dense + self.experts + embeddings

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with, but for the last layer."""
        if not self.expert_count:
            return self.dense
        return self.dense + self.experts * self.experts_per_token / self.expert_count

    @property
    def bytes(self) -> float:
        """Of all weights. Embedding and last layer are not quantized."""
        element = element_bytes(self.kv)
        embeddings = self.parameters - self.dense - self.experts
        return (self.dense + self.experts) * self.weight_bytes + embeddings * element

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step with `tokens` tokens reads: the embedding is only looked
        up, and experts are read that at least one token needs, if tokens choose evenly."""
        layers = self.dense * self.weight_bytes
        if self.expert_count:
            missed = (1.0 - self.experts_per_token / self.expert_count) ** tokens
            layers += self.experts * self.weight_bytes * (1.0 - missed)
        return layers + self.vocabulary * self.hidden * element_bytes(self.kv)


def model_shape(document: Mapping[str, Any]) -> ModelShape:
    """The shape of the model of a parsed config.json. Raises UnknownModelConfig."""
    kv = model_config(document)
    if layer_counts(kv).state:
        raise UnknownModelConfig(
            "config.json: the model has layers with a state (Mamba, linear attention, "
            "convolution), which no roofline here describes: measure it"
        )
    text = document.get("text_config") or document.get("llm_config") or document
    hidden = _number(text, "hidden_size", "n_embd")
    heads = _number(text, "num_attention_heads", "n_head")
    inner = _number(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    matrices = 2 if text.get("model_type") in _UNGATED else 3
    experts = _number(text, "n_routed_experts", "num_local_experts", "num_experts", default=0)
    expert_inner = _number(text, "moe_intermediate_size", default=inner)
    moe_layers = _moe_layers(text, kv.layers) if experts else 0
    shared = _shared_inner(text, expert_inner) if experts else 0
    dense_inner = _number(text, "intermediate_size_mlp", default=inner)
    dense = kv.layers * _attention(text, kv, hidden, heads) + matrices * hidden * (
        (kv.layers - moe_layers) * dense_inner + moe_layers * shared
    )
    quantization = document.get("quantization_config") or text.get("quantization_config") or {}
    return ModelShape(
        kv=kv,
        hidden=hidden,
        heads=heads,
        query_size=_query_size(text, kv),
        vocabulary=_number(text, "vocab_size"),
        widest=matrices * max(inner, dense_inner) + 4 * hidden,
        dense=float(dense),
        experts=float(moe_layers * experts * matrices * hidden * expert_inner),
        expert_count=experts,
        experts_per_token=(
            _number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk")
            if experts
            else 0
        ),
        is_tied=bool(text.get("tie_word_embeddings", document.get("tie_word_embeddings", False))),
        weight_bytes=_weight_bytes(quantization, kv),
        is_fp8=str(quantization.get("quant_method", "")) in _EIGHT_BIT_FLOAT,
    )


def _attention(text: Mapping[str, Any], kv: ModelConfig, hidden: int, heads: int) -> int:
    """Parameters of one attention layer."""
    if kv.latent_size is None:
        queries = heads * kv.head_size
        return hidden * (queries + kv.kv_heads * (kv.head_size + kv.value_size)) + (
            heads * kv.value_size * hidden
        )
    # DeepSeek V2 (arXiv:2405.04434), section 2.1: queries by a latent vector, where there is one.
    query = _query_size(text, kv)
    rank = _number(text, "q_lora_rank", default=0)
    queries = rank * (hidden + heads * query) if rank else hidden * heads * query
    latent = _number(text, "kv_lora_rank")
    plain = _number(text, "qk_nope_head_dim", default=query)
    up = latent * heads * (plain + kv.value_size)
    return queries + hidden * kv.latent_size + up + heads * kv.value_size * hidden


def _query_size(text: Mapping[str, Any], kv: ModelConfig) -> int:
    if kv.latent_size is None:
        return kv.head_size
    plain = _number(text, "qk_nope_head_dim", default=kv.head_size)
    return plain + _number(text, "qk_rope_head_dim", default=0)


def _moe_layers(text: Mapping[str, Any], layers: int) -> int:
    if listed := text.get("moe_layers"):
        return len(listed)
    first = _number(text, "first_k_dense_replace", default=0)
    step = _number(
        text, "interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", default=1
    )
    return (layers - first) // max(1, step) - len(text.get("mlp_only_layers") or ())


def _shared_inner(text: Mapping[str, Any], expert_inner: int) -> int:
    """Width of the experts that every token uses."""
    if text.get("model_type") == "llama4_text":
        return expert_inner
    shared = _number(text, "shared_expert_intermediate_size", default=0)
    return shared or expert_inner * _number(text, "n_shared_experts", default=0)


def _weight_bytes(quantization: Mapping[str, Any], kv: ModelConfig) -> float:
    method = str(quantization.get("quant_method", ""))
    if not method:
        return element_bytes(kv)
    if method in _QUANTIZED_BYTES:
        return _QUANTIZED_BYTES[method]
    bits = quantization.get("bits") or quantization.get("w_bit")
    for group in (quantization.get("config_groups") or {}).values():
        bits = (group.get("weights") or {}).get("num_bits")
    if not isinstance(bits, int) or bits <= 0:
        raise UnknownModelConfig(
            f"config.json: quantization_config: {method!r} without a number of bits"
        )
    return (bits + (_SCALE_BITS if bits < 8 else 0.0)) / 8


def _number(text: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    if default is None:
        raise UnknownModelConfig(f"config.json: no number `{names[0]}`")
    return default
