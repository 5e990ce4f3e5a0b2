"""Shapes of published models, what fits on GPUs, and rooflines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem_planner.kv_size import kv_size, rank_kv_size
from tandem_planner.model_config import UnknownModelConfig
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.memory import memory, tensor_sizes
from tandem_planner.sizing.model_shape import ModelShape, model_shape
from tandem_planner.sizing.roofline import ASSUMED, BEST, WORST, RooflineStep, linear
from tandem_planner.step_cost import prompt_seconds

KNOWN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "cli/tandem_cli/plan/known_models.json").read_text()
)
PUBLISHED = {
    # Parameters and those active per token, in billions, and bytes per parameter, as the models'
    # cards and reports state them.
    "llama-3.1-8b": (8.03, 8.03, 2.0),
    "llama-3.3-70b": (70.6, 70.6, 2.0),
    "llama-3.1-405b-fp8": (405.9, 405.9, 1.0),
    "mixtral-8x7b": (46.7, 12.9, 2.0),
    "qwen3-235b-a22b": (235.1, 22.0, 2.0),
    "gpt-oss-120b": (116.8, 5.1, 0.55),
    "deepseek-v3": (671.0, 37.0, 1.0),
}


def shape(name: str) -> ModelShape:
    return model_shape(KNOWN[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_published_model(name: str) -> None:
    total, active, size = PUBLISHED[name]
    model = shape(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.02)
    # The last layer counts as active, the embedding does not.
    last = model.vocabulary * model.hidden
    assert (model.active + last) / 1e9 == pytest.approx(active, rel=0.08)
    assert model.bytes == pytest.approx(size * model.parameters, rel=0.05)


def test_every_known_model_is_tested_and_has_a_source() -> None:
    assert KNOWN.keys() == PUBLISHED.keys()
    assert all("config.json" in known["_source"] for known in KNOWN.values())


def test_more_ranks_than_heads_hold_copies() -> None:
    # 32,768 tokens of Qwen3 235B are 6.3 GB; eight ranks with four heads move 12.6.
    config = shape("qwen3-235b-a22b").kv
    assert kv_size(config).bytes(32768) == pytest.approx(6.3e9, rel=0.01)
    assert 4 * rank_kv_size(config, 4).bytes(32768) == pytest.approx(6.3e9, rel=0.01)
    assert 8 * rank_kv_size(config, 8).bytes(32768) == pytest.approx(12.6e9, rel=0.01)
    # Of a latent vector, each rank holds a copy.
    latent = shape("deepseek-v3").kv
    assert rank_kv_size(latent, 8) == kv_size(latent)


def test_kv_of_70b_at_8k_is_2_7_gb() -> None:
    assert kv_size(shape("llama-3.3-70b").kv).bytes(8192) == pytest.approx(2.68e9, rel=0.01)


def test_what_fits_follows_vllms_arithmetic() -> None:
    model, gpu = shape("llama-3.3-70b"), GPUS["h100"]
    four = memory(model, gpu, 4)
    assert four.usable == pytest.approx(72e9)
    assert four.weights == pytest.approx(35.3e9, rel=0.01)
    assert four.kv == four.usable - four.weights - four.activations - four.runtime
    # 2 of 8 heads: 80 layers × 2 heads × 128 × 2 (K and V) × 2 bytes.
    assert four.per_token == 81_920
    assert 350_000 < four.tokens < 450_000
    assert memory(model, gpu, 2).tokens == 0
    assert memory(model, gpu, 2).kv < 0
    assert memory(model, gpu, 4, weights=100e9).tokens > four.tokens


def test_tensor_sizes_divide_heads() -> None:
    assert tensor_sizes(shape("llama-3.3-70b")) == [1, 2, 4, 8]
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
    assert tensor_sizes(model_shape(gpt2)) == [1, 2, 4]


def test_a_model_with_states_is_unknown() -> None:
    config = {**KNOWN["llama-3.1-8b"], "layer_types": ["full_attention", "linear_attention"] * 16}
    with pytest.raises(UnknownModelConfig, match="measure it"):
        model_shape(config)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_a_config_without_a_needed_number_is_refused(name: str) -> None:
    config = {key: value for key, value in KNOWN["mixtral-8x7b"].items() if key != name}
    with pytest.raises(UnknownModelConfig, match=name):
        model_shape(config)


def test_every_gpu_names_its_source_and_its_links_are_of_one_direction() -> None:
    for gpu in GPUS.values():
        assert "data sheet" in gpu.source
        assert gpu.bf16 > 1e14
        assert gpu.bandwidth < 1e13
    # The H100's NVLink is sold as 900 GB/s, its FLOP/s with sparsity.
    assert GPUS["h100"].nvlink == 450e9
    assert GPUS["h100"].bf16 == 989e12
    assert GPUS["l40s"].within_node == GPUS["l40s"].pcie


def test_a_prefill_is_bound_by_computing_and_a_decode_by_memory() -> None:
    model, gpu = shape("llama-3.3-70b"), GPUS["h100"]
    step = RooflineStep(model, gpu, 1)
    computing = 2 * model.active * 8192 / (gpu.bf16 * ASSUMED.matrices)
    assert computing < step.seconds(0, 0, 8192) < 1.02 * computing
    reading = model.read_bytes(1) / (gpu.bandwidth * ASSUMED.memory)
    assert reading < step.seconds(1, 0) < 1.1 * reading
    # More decodes share the reading; their own KV is read for each.
    assert step.seconds(64, 0) < 1.1 * step.seconds(1, 0)
    kv = 64 * kv_size(model.kv).bytes(4000) / (gpu.bandwidth * ASSUMED.memory)
    assert step.seconds(64, 64 * 4000) - step.seconds(64, 0) == pytest.approx(kv)


def test_bounds_enclose_what_is_assumed() -> None:
    model = shape("qwen3-235b-a22b")
    best, middle, worst = (
        RooflineStep(model, GPUS["h200"], 8, efficiency=each) for each in (BEST, ASSUMED, WORST)
    )
    for work in ((1, 500), (64, 64_000), (0, 0, 4096, 4096.0**2), (32, 9e4, 512, 1e6)):
        assert best.seconds(*work) < middle.seconds(*work) < worst.seconds(*work)


def test_few_tokens_read_few_experts() -> None:
    model = shape("deepseek-v3")
    assert model.read_bytes(1) < 0.1 * model.bytes
    assert model.read_bytes(512) > 0.95 * (model.bytes - 2e9)


def test_a_window_bounds_what_is_read() -> None:
    step = RooflineStep(shape("gpt-oss-120b"), GPUS["h100"], 1)
    near, far = step.seconds(1, 128), step.seconds(1, 100_128)
    full = 18 * 8 * 64 * 2 * 2 / (GPUS["h100"].bandwidth * ASSUMED.memory)
    assert far - near == pytest.approx(100_000 * full, rel=0.01)


def test_coefficients_describe_the_roofline_where_they_are_taken() -> None:
    step = RooflineStep(shape("llama-3.1-8b"), GPUS["h100"], 1)
    around = linear(step, decodes=64, context=1000.0, chunk=2048)
    assert around.seconds(64, 64_000) == pytest.approx(step.seconds(64, 64_000), rel=1e-6)
    assert around.seconds(16, 16_000) == pytest.approx(step.seconds(16, 16_000), rel=1e-6)
    assert prompt_seconds(around, 0, 2048, 2048) == pytest.approx(
        prompt_seconds(step, 0, 2048, 2048), rel=1e-6
    )
