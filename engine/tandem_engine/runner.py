"""Runs a planned step on the model: chunks in, tokens out. For the engine's worker thread."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .cache import KvCache
from .config import EngineConfig
from .model import Batch, DecodeRows, Llama, PrefillRows
from .sampler import sample
from .step import Chunk, SampledToken
from .types import ConfigError
from .weights import ModelConfig, fingerprint, load_config, load_weights, resolve_dtype

_Ints = NDArray[np.int64]


class Runner:
    """Model, weights and KV cache."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model; takes as long as reading the weights.

        Raises ModelError for an unusable model directory, ConfigError for a device that torch does
        not find, a length above the model's and a KV cache that cannot be allocated.
        """
        # Checks that need no memory come first: a wrong flag fails before the weights are read.
        self.model_config = load_config(config.model)
        self.max_model_len = _max_model_len(config, self.model_config)
        self._device = _device(config)
        dtype = resolve_dtype(config.dtype, self.model_config)
        # Before the cache, whose default size is a share of the memory that is left.
        weights = load_weights(config.model, self.model_config, dtype, self._device)
        self.cache = KvCache(
            self.model_config,
            config,
            dtype=dtype,
            device=self._device,
            fingerprint=fingerprint(config.model, self.model_config),
        )
        self._model = Llama(self.model_config, weights, self.cache, self.max_model_len)

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], on_layer: Callable[[int], None] | None = None
    ) -> list[SampledToken | None]:
        """Compute the chunks. Returns each one's sampled token; None: more of its prompt follows.
        The device has nothing left to do then.

        `on_layer` as in `Llama.forward`, called from this thread.
        """
        # Stable, so that the chunks of one token come first and the others keep their order.
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].token_ids) > 1)
        batch = self._batch([chunks[i] for i in order])
        logits = self._model.forward(batch, on_layer)
        results: list[SampledToken | None] = [None] * len(chunks)
        sampling = [i for i in order if chunks[i].draw is not None]
        draws = [draw for i in sampling if (draw := chunks[i].draw) is not None]
        if draws:
            for i, sampled in zip(sampling, sample(logits, draws), strict=True):
                # In the order of `chunks`, not of the batch: the engine zips both.
                results[i] = sampled
        elif self._device.type == "cuda":
            # Sampling waits for the device. A step that samples nothing must, too: its blocks would
            # be freed too early, and the cost model would take its time for nothing.
            torch.cuda.current_stream(self._device).synchronize()
        return results

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The chunks as tensors; chunks of one token come first."""
        bounds = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
        singles = [chunk for chunk in chunks if len(chunk.token_ids) == 1]
        prefills = chunks[len(singles) :]
        spans = pairwise(bounds[len(singles) :])
        positions = [np.array([chunk.start for chunk in singles], np.int64)]
        keys = [np.array([self._key_row(chunk) for chunk in singles], np.int64)]
        positions += [_positions(chunk) for chunk in prefills]
        keys += [self._key_rows(chunk) for chunk in prefills]
        rows = np.concatenate(keys)
        return Batch(
            token_ids=self._tensor([t for chunk in chunks for t in chunk.token_ids]),
            positions=self._tensor(np.concatenate(positions)),
            # A block has its keys first: a token's value is block_size rows after its key.
            slots=self._tensor(np.stack((rows, rows + self.cache.layout.block_size), 1)),
            decodes=self._decode_rows(singles) if singles else None,
            prefills=tuple(
                self._prefill_rows(c, *span) for c, span in zip(prefills, spans, strict=True)
            ),
            logit_rows=self._tensor(
                [end - 1 for chunk, end in zip(chunks, bounds[1:], strict=True) if chunk.draw]
            ),
        )

    def _key_row(self, chunk: Chunk) -> int:
        """Cache row of a single token's key; a row holds one token's heads."""
        block, offset = divmod(chunk.start, self.cache.layout.block_size)
        return chunk.blocks[block] * 2 * self.cache.layout.block_size + offset

    def _key_rows(self, chunk: Chunk) -> _Ints:
        block, offset = np.divmod(_positions(chunk), self.cache.layout.block_size)
        return np.array(chunk.blocks)[block] * (2 * self.cache.layout.block_size) + offset

    def _decode_rows(self, chunks: Sequence[Chunk]) -> DecodeRows:
        lengths = np.array([chunk.end for chunk in chunks])
        tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int64)
        # Rows of the padding are block 0, whose positions the mask hides.
        for row, chunk in zip(tables, chunks, strict=True):
            row[: len(chunk.blocks)] = chunk.blocks
        places = np.arange(tables.shape[1] * self.cache.layout.block_size)
        mask = self._mask(places < lengths[:, None])
        return DecodeRows(len(chunks), self._halves(tables), mask[:, None, None])

    def _prefill_rows(self, chunk: Chunk, begin: int, end: int) -> PrefillRows:
        # The chunk has its whole context itself: no cache to gather, and a plain causal mask.
        if chunk.start == 0:
            return PrefillRows(begin, end, chunk.end)
        if self._device.type == "cuda":
            return PrefillRows(begin, end, chunk.end, self._halves(np.array([chunk.blocks])))
        mask = self._mask(np.arange(chunk.end) <= _positions(chunk)[:, None])
        return PrefillRows(begin, end, chunk.end, self._halves(np.array([chunk.blocks])), mask)

    def _halves(self, tables: _Ints) -> Tensor:
        """Row indices of the blocks' key and value halves, [2, *tables]."""
        return self._tensor(np.stack((2 * tables, 2 * tables + 1)))

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        """A mask that is added to the scores; torch would convert a boolean one in every layer."""
        hidden = self._tensor(~visible)
        mask = torch.zeros(hidden.shape, dtype=self.cache.layers[0].dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _tensor(self, values: Iterable[int] | NDArray[np.generic]) -> Tensor:
        array = values if isinstance(values, np.ndarray) else np.array(values, np.int64)
        return torch.from_numpy(array).to(self._device)


def _positions(chunk: Chunk) -> _Ints:
    return np.arange(chunk.start, chunk.end)


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but torch finds no GPU: use cpu or auto")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if (length := config.max_model_len) is None:
        return model.max_position
    if length > model.max_position:
        raise ConfigError(
            f"max_model_len is {length}: the model goes up to {model.max_position} tokens"
        )
    return length
