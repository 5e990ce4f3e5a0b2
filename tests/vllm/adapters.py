"""Writes a small LoRA adapter with random weights for the tiny Llama."""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

_RANK: Final = 8
_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(directory: Path, model: Path, *, seed: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors as PEFT does; the same bytes for a
    seed. Keys and values differ too, so KV of the base model would show.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    outputs = {"q_proj": hidden, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in _PROJECTIONS:
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = matrix(_RANK, hidden)
            tensors[f"{module}.lora_B.weight"] = matrix(outputs[name], _RANK)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": list(_PROJECTIONS),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
