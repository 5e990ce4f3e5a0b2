"""Engines on one GPU with a model of real size, whose random weights are made on the device, and
requests to them.

The engines of a process share the weights, so that two of them fit on one GPU.
"""

import asyncio
import functools
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from tests.engine.engines import GREEDY, Tally, finish

from tandem_engine import runner
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.tiers import build
from tandem_engine.types import Request
from tandem_engine.weights import LayerWeights, ModelConfig, Weights
from tandem_kvstore import client
from tandem_kvstore.guard.load_guard import LoadGuard


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def token_bytes(self) -> int:
        """KV of one token in bfloat16."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2


SHAPES: Final = {
    "8b": Shape(32, 4096, 14_336, 32, 8, 128_256),
    "small": Shape(4, 256, 768, 8, 2, 512),
}
"""`8b` is the shape of Llama 3.1 8B: 128 KiB of KV for each token. `small` is to try the script."""
LONGEST: Final = 33_000


def write_config(directory: Path, shape: Shape) -> None:
    """Write config.json, all that a model directory needs here."""
    config = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": LONGEST,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


@functools.cache
def _weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Weights:
    """Random weights with the gains of `tandem_engine.tiny`: logits that differ clearly."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner = config.hidden_size, config.intermediate_size

    def matrix(out: int, inputs: int, gain: float = 1.0) -> torch.Tensor:
        new = torch.empty(out, inputs, dtype=dtype, device=device)
        return new.normal_(0, gain / inputs**0.5, generator=generator)

    def layer() -> LayerWeights:
        kv = config.kv_heads * config.head_dim
        ones = torch.ones(hidden, dtype=dtype, device=device)
        return LayerWeights(
            input_norm=ones,
            qkv=torch.cat((matrix(hidden + kv, hidden, 2.0), matrix(kv, hidden))),
            qkv_bias=None,
            o=matrix(hidden, hidden, 2.0),
            o_bias=None,
            post_norm=ones,
            gate_up=matrix(2 * inner, hidden),
            gate_up_bias=None,
            down=matrix(hidden, inner),
            down_bias=None,
        )

    return Weights(
        embedding=matrix(config.vocab_size, hidden, hidden**0.5),
        layers=tuple(layer() for _ in range(config.layers)),
        norm=torch.ones(hidden, dtype=dtype, device=device),
        head=matrix(config.vocab_size, hidden, 4.0),
    )


class Models:
    """Starts engines on one model and one device. Use as a context manager."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self._directory = tempfile.TemporaryDirectory()
        self._patches = (
            mock.patch.object(runner, "load_weights", lambda _, *rest: _weights(*rest)),
            mock.patch.object(runner, "fingerprint", return_value="random"),
            mock.patch.object(build, "tensor_files", return_value=[]),
            mock.patch.object(build, "weights_hash", return_value="0" * 64),
        )

    def __enter__(self) -> "Models":
        write_config(Path(self._directory.name), self.shape)
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
        self._directory.cleanup()

    @asynccontextmanager
    async def engine(
        self, tally: Tally | None = None, guard: type[LoadGuard] = LoadGuard, **settings: Any
    ) -> AsyncIterator[Engine]:
        """A started engine with room for one prompt of the greatest length."""
        values = {
            "dtype": "bfloat16",
            "num_blocks": LONGEST // 16 + 32,
            "max_num_batched_tokens": 8192,
            **settings,
        }
        directory = Path(self._directory.name)
        config = EngineConfig(model=directory, device=self.device, **values)  # type: ignore[arg-type]
        engine = Engine(config, tally or Tally())
        with mock.patch.object(client, "LoadGuard", guard):
            await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()


_SHARED: Final = Path("/dev/shm")
_ids = map(str, itertools.count())


def tokens_of(length: int, seed: object) -> tuple[int, ...]:
    """A prompt."""
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(4, 500) for _ in range(length))


async def forget(engine: Engine) -> None:
    """Empty the prefix cache; blocks are in use until their chunks are copied."""
    while not engine.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
        await asyncio.sleep(0.002)


async def ask(
    engine: Engine, tokens: tuple[int, ...], count: int = 1, kv: Any = None
) -> tuple[float, list[int], Any]:
    """Seconds, tokens and transfer parameters of one answer."""
    begin = time.perf_counter()
    request = Request(next(_ids), tokens, GREEDY(max_tokens=count), kv)
    answer, last = await finish(engine.submit(request))
    return time.perf_counter() - begin, answer, last.kv_transfer_params


@contextmanager
def large_directory() -> Iterator[str]:
    """A directory for stored KV: in memory, if there is space."""
    in_memory = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > 20 << 30
    with tempfile.TemporaryDirectory(dir=_SHARED if in_memory else None) as directory:
        yield directory


@asynccontextmanager
async def store_server() -> AsyncIterator[str]:
    """`tandem store`; yields its URL."""
    with large_directory() as directory:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tandem_cli", "store"),
            *("--listen", "127.0.0.1:0", "--dir", directory),
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        assert process.stdout is not None
        try:
            yield (await process.stdout.readline()).decode().split()[-1]
        finally:
            process.terminate()
            await process.wait()
