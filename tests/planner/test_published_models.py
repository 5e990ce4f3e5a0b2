"""KV sizes of published models: the fields of their config.json that matter, as published.

The layers of each kind come from the models' own reports and transformers' code, not from this
project's.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_planner.kv_size import kv_size
from tandem_planner.layer_kinds import LayerCounts, layer_counts
from tandem_planner.model_config import model_config

MODELS: dict[str, tuple[dict[str, Any], LayerCounts, int]] = {
    "google/gemma-2-9b": (
        {
            "model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "hidden_size": 3584, "sliding_window": 4096,
        },
        LayerCounts(21, 21), 8 * 2 * 256,
    ),
    "google/gemma-3-27b-it": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
                "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376,
                "sliding_window": 1024,
            },
        },
        LayerCounts(10, 52), 16 * 2 * 128,
    ),
    "google/gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560,
                "sliding_window": 1024,
            },
        },
        LayerCounts(5, 29), 4 * 2 * 256,
    ),
    "ai21labs/Jamba-v0.1": (
        {
            "model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_size": 4096, "attn_layer_period": 8,
            "attn_layer_offset": 4, "sliding_window": None,
        },
        LayerCounts(4, state=28), 8 * 2 * 128,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        {
            "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "hidden_size": 3584, "max_window_layers": 28,
            "sliding_window": 131072, "use_sliding_window": False,
        },
        LayerCounts(28), 4 * 2 * 128,
    ),
    "mistralai/Mistral-7B-v0.1": (
        {
            "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096,
        },
        LayerCounts(0, 32), 8 * 2 * 128,
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        {
            "model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": None,
        },
        LayerCounts(32), 8 * 2 * 128,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {
            "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
            "full_attention_interval": 4, "use_sliding_window": False,
        },
        LayerCounts(12, state=36), 2 * 2 * 256,
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (
        {
            "model_type": "nemotron_h", "num_hidden_layers": 56, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4480, "sliding_window": None,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        },
        LayerCounts(4, state=27), 8 * 2 * 128,
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        {
            "model_type": "phi3", "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "hidden_size": 3072, "sliding_window": 262144,
        },
        LayerCounts(0, 32), 32 * 2 * 96,
    ),
    "openai/gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        LayerCounts(12, 12), 8 * 2 * 64,
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
                "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 5120,
                "attention_chunk_size": 8192, "no_rope_layers": [],
            },
        },
        LayerCounts(12, 36), 8 * 2 * 128,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "hidden_size": 2048, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        LayerCounts(27), 576,
    ),
    "deepseek-ai/DeepSeek-V3": (
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        LayerCounts(61), 576,
    ),
    "llava-hf/llava-1.5-7b-hf": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
        LayerCounts(32), 32 * 2 * 128,
    ),
}  # fmt: skip
"""Model → its fields, its layers by kind, and elements per token and layer."""


@pytest.mark.parametrize("model", MODELS)
def test_layers_and_bytes_of_a_published_model(model: str) -> None:
    document, counts, elements = MODELS[model]
    config = model_config(document)
    assert layer_counts(config) == counts
    size, short = kv_size(config), (counts.full + counts.window) * elements * 2
    assert size.bytes(100) == short * 100
    if counts.window and config.window is not None:
        beyond = config.window + 1000
        expected = (counts.full * beyond + counts.window * config.window) * elements * 2
        assert size.bytes(beyond) == expected
    else:
        assert size.bytes(1_000_000) == short * 1_000_000


def test_the_indexer_of_deepseek_v32_counts_132_bytes_per_token_and_layer() -> None:
    document = {**MODELS["deepseek-ai/DeepSeek-V3"][0], "index_head_dim": 128}
    document["model_type"] = "deepseek_v32"
    assert kv_size(model_config(document)).bytes(1000) == 1000 * 61 * (576 * 2 + 132)


def test_llama_4_may_list_its_layers_without_rotary_embeddings() -> None:
    text = MODELS["meta-llama/Llama-4-Scout-17B-16E-Instruct"][0]["text_config"]
    listed = {"text_config": {**text, "no_rope_layers": [1, 1, 1, 0] * 12}}
    assert layer_counts(model_config(listed)) == LayerCounts(12, 36)
    unchunked = {"text_config": {**text, "attention_chunk_size": None}}
    assert layer_counts(model_config(unchunked)) == LayerCounts(48)


def test_qwen2_slides_in_the_layers_after_the_first_ones() -> None:
    document, _, _ = MODELS["Qwen/Qwen2.5-7B-Instruct"]
    sliding = {**document, "use_sliding_window": True, "max_window_layers": 21}
    assert layer_counts(model_config(sliding)) == LayerCounts(21, 7)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"attn_layer_indices": [9, 18, 27]}, LayerCounts(3, state=29)),
        ({"full_attn_idxs": [2, 5, 8, 10, 12, 14]}, LayerCounts(6, state=26)),
    ],
)
def test_hybrids_may_list_their_attention_layers(
    fields: dict[str, Any], counts: LayerCounts
) -> None:
    document, _, _ = MODELS["mistralai/Mistral-7B-Instruct-v0.3"]
    assert layer_counts(model_config({**document, "model_type": "novel", **fields})) == counts


@given(st.sampled_from(["novel", "qwen2", "llama", None]), st.integers(1, 10**6))
def test_a_window_without_a_pattern_counts_in_full(kind: str | None, window: int) -> None:
    document, _, _ = MODELS["mistralai/Mistral-7B-v0.1"]
    document = {**document, "model_type": kind, "sliding_window": window}
    assert kv_size(model_config(document)).bytes(10**6) == 10**6 * 32 * 8 * 2 * 128 * 2
