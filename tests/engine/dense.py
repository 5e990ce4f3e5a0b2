"""A plain Llama forward to compare with: one sequence, no cache, no paging, no batching.

Written from the published architecture, apart from the engine's code: it reads the safetensors by
their names and keeps every head and every matrix separate.
"""

import functools
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class DenseLlama:
    """Recomputes everything for every token, in float64."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = {
            name: tensor.double()
            for file in sorted(directory.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """The `count` most probable next tokens, one after the other."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def logits(self, tokens: list[int]) -> Tensor:
        """[tokens, vocabulary]"""
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + self._attention(at + "self_attn.", self._norm(at + "input_layernorm", x))
            y = self._norm(at + "post_attention_layernorm", x)
            gate = self._linear(at + "mlp.gate_proj", y)
            up = self._linear(at + "mlp.up_proj", y)
            x = x + self._linear(at + "mlp.down_proj", gate * torch.sigmoid(gate) * up)
        tied = self.config["tie_word_embeddings"]
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return self._norm("model.norm", x) @ self.tensors[head].T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) ** -0.5
        return x * scale * self.tensors[name + ".weight"]

    def _attention(self, at: str, x: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = self.config["head_dim"]
        q, k, v = (self._linear(f"{at}{n}_proj", x) for n in "qkv")
        causal = torch.ones(len(x), len(x)).tril().bool()
        outputs = []
        for head in range(heads):
            shared = head * kv_heads // heads
            query_columns = slice(head * dim, (head + 1) * dim)
            kv_columns = slice(shared * dim, (shared + 1) * dim)
            scores = (
                self._rotated(q[:, query_columns]) @ self._rotated(k[:, kv_columns]).T / dim**0.5
            )
            outputs.append(scores.masked_fill(~causal, -math.inf).softmax(-1) @ v[:, kv_columns])
        return self._linear(at + "o_proj", torch.cat(outputs, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Each pair (i, i + half) turned by position × frequency."""
        a, b = x.chunk(2, -1)
        cosine, sine = self._turns(len(x), a.shape[1])
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)

    @functools.lru_cache(maxsize=4)  # noqa: B019 - few instances, and few lengths of each
    def _turns(self, tokens: int, half: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position (row) and pair (column)."""
        frequencies = [self._frequency(i / half) for i in range(half)]
        angles = torch.outer(
            torch.arange(tokens, dtype=torch.float64),
            torch.tensor(frequencies, dtype=torch.float64),
        )
        return angles.cos(), angles.sin()

    def _frequency(self, share: float) -> float:
        frequency = float(self.config["rope_theta"] ** -share)
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequency
        if scaling["rope_type"] == "linear":
            return frequency / float(scaling["factor"])
        length = 2 * math.pi / frequency
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if length < original / high:
            return frequency
        if length > original / low:
            return frequency / float(scaling["factor"])
        smooth = (original / length - low) / (high - low)
        return float((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
