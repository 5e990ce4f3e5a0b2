"""Writes a tiny Llama with random weights and a byte-level tokenizer to a model directory.

Its answers make no sense, but they are computed like any model's: greedy answers depend on every
token before them, and the logits are far enough apart that float64 gives the same answer on every
machine.
"""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .types import EngineError

SPECIAL_TOKENS: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
"""The first tokens of the vocabulary, in this order."""
_SMALLEST_VOCAB: Final = len(SPECIAL_TOKENS) + 256
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEXT: Final = """
When a prompt arrives, the prefill pod reads all of it at once and leaves its keys and values in
blocks. The decode pod takes these blocks over the network and writes the answer, one token after
another. A conversation comes back with everything that was said before, so the blocks of the
first turns are found again and only the last turn is new. How long a user waits for the first
token depends on the length of what is new; how quickly the words follow depends on how many
others are being served. What would you like to know about the system? Please tell me more about
the weather in the mountains, the history of the printing press, and the way a ship finds harbour
at night. Thank you, that was helpful; could you explain the second point again, with an example?
"""


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    vocab: int = 512,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    max_position: int = 8192,
) -> None:
    """Write config.json, model.safetensors (float32) and the tokenizer; the same bytes each time.

    Raises TinyModelError when the sizes do not go together.
    """
    if vocab < _SMALLEST_VOCAB:
        raise TinyModelError(f"vocab is {vocab}: bytes and special tokens take {_SMALLEST_VOCAB}")
    if hidden % (2 * heads) or heads % kv_heads:
        raise TinyModelError(
            f"hidden {hidden}, heads {heads}, kv_heads {kv_heads}: each must divide the one before,"
            " and a head's width must be even"
        )
    directory.mkdir(parents=True, exist_ok=True)
    inner = 3 * hidden
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": [1, 3],
        "torch_dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    save_file(
        _tensors(config, torch.Generator().manual_seed(seed)),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_tokenizer(directory, vocab)


class TinyModelError(EngineError, ValueError):
    """The sizes do not make a model; the message says which rule they break."""


def _tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random projections that keep the residual stream's scale.

    Queries and keys are scaled up so that attention selects tokens instead of averaging over all,
    and answers depend on distant tokens; the head is scaled up so that logits differ clearly.
    """
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(out: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, inputs, generator=generator).mul_(gain / inputs**0.5)

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        tensors |= {
            f"{prefix}input_layernorm.weight": torch.ones(hidden),
            f"{prefix}self_attn.q_proj.weight": matrix(hidden, hidden, 2.0),
            f"{prefix}self_attn.k_proj.weight": matrix(kv, hidden, 2.0),
            f"{prefix}self_attn.v_proj.weight": matrix(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, hidden, 2.0),
            f"{prefix}post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = matrix(vocab, hidden, 4.0)
    return tensors


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """Byte-level BPE of exactly `vocab` tokens: bytes, merges learned from the text, fillers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_tokens(
        [
            AddedToken(f"<|unused_{i}|>", normalized=False)
            for i in range(tokenizer.get_vocab_size(), vocab)
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
