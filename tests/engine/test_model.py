"""The forward pass against the dense reference, for each shape a Llama-family model takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.config import EngineConfig
from tandem_engine.runner import Runner
from tandem_engine.step import Chunk, Draw, Sequence
from tandem_engine.types import Request, SamplingParams

from .dense import DenseLlama
from .device import DEVICE
from .engines import prompt, tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2": {"model_type": "qwen2"},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
}
BIASES = {
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "biased": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def variant(directory: Path, name: str) -> Path:
    """The tiny model with other fields, and tensors to match."""
    fields, model = VARIANTS[name], directory / "model"
    shutil.copytree(tiny_model(), model)
    config = json.loads((model / "config.json").read_text()) | fields
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    for key, tensor in list(tensors.items()):
        if "k_proj" in key or "v_proj" in key:
            tensors[key] = tensor = torch.randn(kv, 64, generator=generator) / 4
        if key.split(".")[-2] in BIASES.get(name, ()):
            bias = torch.randn(len(tensor), generator=generator)
            tensors[key.replace(".weight", ".bias")] = bias
    save_file(tensors, model / "model.safetensors")
    return model


def chunk(tokens: tuple[int, ...], start: int, end: int, blocks: tuple[int, ...]) -> Chunk:
    """Blocks of four tokens; only the whole prompt's last chunk draws."""
    sampling = SamplingParams(temperature=0, logprobs=512)
    seq = Sequence(Request("x", tokens), 0, 0, frozenset(), 0.0)
    draw = Draw(sampling, 0, 0) if end == len(tokens) else None
    return Chunk(seq, tokens[start:end], start, blocks[: -(-end // 4)], draw)


def runner(model: Path, dtype: Any = "float64") -> Runner:
    return Runner(
        EngineConfig(model=model, dtype=dtype, block_size=4, num_blocks=40, device=DEVICE)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_the_reference_s(tmp_path: Path, name: str) -> None:
    """One step of a decode, a chunk that goes on and one that starts, in scattered blocks."""
    model = variant(tmp_path, name)
    engine = runner(model)
    first, second, third = prompt(14, 1), prompt(30, 2), prompt(9, 3)
    a, b, c = (30, 2, 17, 5), (1, 39, 4, 20, 8, 11, 0, 3), (25, 24, 23)
    engine.run([chunk(first, 0, 13, a), chunk(second, 0, 6, b)])
    results = engine.run([chunk(second, 6, 30, b), chunk(first, 13, 14, a), chunk(third, 0, 9, c)])
    dense = DenseLlama(model)
    for tokens, result in zip((second, first, third), results, strict=True):
        assert result is not None
        assert result.logprobs is not None
        expected_logprobs = dense.logits(list(tokens))[-1].log_softmax(-1)
        logprobs = torch.zeros(512, dtype=torch.float64)
        for token, value in result.logprobs.top:
            logprobs[token] = value
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes_stay_near(dtype: str) -> None:
    tokens = prompt(20)
    (result,) = runner(tiny_model(), dtype).run([chunk(tokens, 0, 20, (0, 1, 2, 3, 4))])
    assert result is not None
    assert result.logprobs is not None
    expected_logprobs = DenseLlama(tiny_model()).logits(list(tokens))[-1].log_softmax(-1)
    tolerance = {"float32": 1e-3, "bfloat16": 2.0, "float16": 0.3}[dtype]
    assert abs(result.logprobs.chosen - float(expected_logprobs[result.token])) < tolerance


def test_layers_are_announced_once_their_kv_is_written() -> None:
    engine = runner(tiny_model())
    calls: list[tuple[int, list[bool]]] = []

    def note(layers: int) -> None:
        calls.append((layers, [bool(layer[7].any()) for layer in engine.cache.layers]))

    engine.run([chunk(prompt(3), 0, 3, (7,))], note)
    assert calls == [(1, [True, False]), (2, [True, True])]


def test_blocks_lie_in_one_piece_and_hold_keys_then_values() -> None:
    engine = runner(tiny_model())
    layout = engine.cache.layout
    for layer in engine.cache.layers:
        assert layer.shape == (40, 2, 4, layout.kv_heads, layout.head_dim)
        assert layer.is_contiguous()
        assert layer[0].numel() * layer.element_size() == layout.block_bytes
