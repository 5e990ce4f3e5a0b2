import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem_engine.weights import (
    ModelError,
    RopeScaling,
    fingerprint,
    load_config,
    load_weights,
    resolve_dtype,
)

from .engines import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def edit(model: Path, **fields: Any) -> None:
    file = model / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def shard(model: Path) -> None:
    """The same tensors in two files with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, model / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def load(model: Path) -> None:
    config = load_config(model)
    load_weights(model, config, torch.float32, torch.device("cpu"))


def test_copies_agree_in_fingerprint_and_models_do_not(model: Path) -> None:
    config = load_config(model)
    first = fingerprint(model, config)
    assert first == fingerprint(tiny_model(), config)
    shard(model)
    load(model)
    assert fingerprint(model, config) == first
    edit(model, rope_theta=500.0)
    assert fingerprint(model, load_config(model)) != first
    tensors = load_file(tiny_model() / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, model / "a.safetensors")
    (model / "model.safetensors.index.json").unlink()
    (model / "b.safetensors").unlink()
    assert fingerprint(model, config) != first


def test_generation_config_has_the_last_word_on_eos(model: Path) -> None:
    assert load_config(model).eos_token_ids == (1, 3)
    (model / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert load_config(model).eos_token_ids == (9,)


def test_rope_is_read_in_both_spellings(model: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    edit(model, rope_scaling=llama3)
    assert load_config(model).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    edit(model, rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    config = load_config(model)
    assert (config.rope_theta, config.rope_scaling) == (7.0, None)


def test_auto_dtype_is_the_checkpoints(model: Path) -> None:
    edit(model, torch_dtype="bfloat16")
    assert resolve_dtype("auto", load_config(model)) is torch.bfloat16
    assert resolve_dtype("float64", load_config(model)) is torch.float64
    edit(model, torch_dtype="float8_e4m3fn")
    with pytest.raises(ModelError, match="computes in"):
        resolve_dtype("auto", load_config(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2': this engine runs"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'yarn': this engine has"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "malformed"),
        ({"vocab_size": 513}, r"embed_tokens.weight is \[512, 64\], config.json makes it \[513"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"attention_bias": True}, "q_proj.bias is missing"),
    ],
)
def test_a_model_that_cannot_run_is_named(
    model: Path, fields: dict[str, Any], message: str
) -> None:
    edit(model, **fields)
    with pytest.raises(ModelError, match=message):
        load(model)


def test_broken_files_are_named(model: Path) -> None:
    tensors = model / "model.safetensors"
    tensors.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
        load(model)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file"):
        fingerprint(model, load_config(model))
    tensors.unlink()
    with pytest.raises(ModelError, match="no such file"):
        load(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        load_config(model)
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot read it"):
        load_config(model)
