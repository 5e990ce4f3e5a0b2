"""KV bytes of known models, computed by hand from their config.json."""

from typing import Any

import pytest

from tandem_planner.kv_size import KvSize, element_bytes, kv_size
from tandem_planner.layer_kinds import LayerCounts, layer_counts
from tandem_planner.model_config import UnknownModelConfig, model_config

LLAMA_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
GEMMA3 = {
    "text_config": {
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "hidden_size": 3840, "sliding_window": 1024, "sliding_window_pattern": 6,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2 = {
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_size": 3584, "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
QWEN3_NEXT = {
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "hidden_size": 2048, "full_attention_interval": 4,
}  # fmt: skip
GPT_OSS = {
    "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "hidden_size": 2880, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
NEMOTRON_H = {
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 4096, "hybrid_override_pattern": "M-M*",
}  # fmt: skip
FALCON = {"n_layer": 2, "n_head": 8, "n_embd": 512, "multi_query": True}


@pytest.mark.parametrize(
    ("document", "tokens", "expected"),
    [
        pytest.param(LLAMA_8B, 1000, 131_072_000, id="gqa"),
        pytest.param(GPT2, 10, 10 * 12 * 2 * 768 * 4, id="mha"),
        pytest.param(DEEPSEEK_V3, 1000, 1000 * 61 * 576 * 2, id="mla"),
        pytest.param(MISTRAL, 1000, 131_072_000, id="window, short"),
        pytest.param(MISTRAL, 50_000, 4096 * 131_072, id="window, long"),
        pytest.param(
            GEMMA3, 100_000, (8 * 100_000 + 40 * 1024) * 8 * 512 * 2, id="window and global"
        ),
        pytest.param(QWEN2, 200_000, 200_000 * 28 * 4 * 256 * 2, id="window switched off"),
        pytest.param(QWEN3_NEXT, 1000, 1000 * 12 * 2 * 512 * 2, id="hybrid by interval"),
        pytest.param(GPT_OSS, 1000, (18 * 1000 + 18 * 128) * 8 * 128 * 2, id="by layer"),
        pytest.param(NEMOTRON_H, 1000, 1000 * 1 * 8 * 256 * 2, id="hybrid by pattern"),
        pytest.param(FALCON, 100, 100 * 2 * 1 * 128 * 2, id="multi-query"),
    ],
)
def test_bytes_of_known_models(document: dict[str, Any], tokens: int, expected: float) -> None:
    assert kv_size(model_config(document)).bytes(tokens) == expected


def test_an_fp8_cache_halves_them() -> None:
    config = model_config(LLAMA_8B)
    assert kv_size(config, "fp8").bytes(1000) == 65_536_000
    assert kv_size(config, "fp8_e5m2") == kv_size(config, "fp8")
    assert kv_size(config, "float16") == kv_size(config)


@pytest.mark.parametrize(
    ("dtype", "size"), [("torch.float16", 2), ("float32", 4), ("bfloat16", 2), ("unheard", 2)]
)
def test_the_models_type_is_the_caches(dtype: str, size: float) -> None:
    assert element_bytes(model_config({**LLAMA_8B, "torch_dtype": dtype})) == size


def test_a_size_without_windows_is_linear() -> None:
    assert KvSize(10.0).bytes(7) == 70.0


def test_unknown_layer_names_count_in_full() -> None:
    config = model_config({**LLAMA_8B, "layer_types": ["full_attention", "novel", "mamba", "moe"]})
    assert layer_counts(config) == LayerCounts(full=2, state=1)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(missing: str) -> None:
    document = {key: value for key, value in LLAMA_8B.items() if key != missing}
    with pytest.raises(UnknownModelConfig, match=missing):
        model_config(document)
