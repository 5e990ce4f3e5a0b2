import pytest
import torch

from tandem_engine.cache import KvCache
from tandem_engine.config import EngineConfig
from tandem_engine.types import ConfigError
from tandem_engine.weights import load_config

from .engines import tiny_model


def cache(**settings: int) -> KvCache:
    config = EngineConfig(model=tiny_model(), **settings)  # type: ignore[arg-type]  # ints only
    return KvCache(
        load_config(tiny_model()),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        fingerprint="f",
    )


def test_bytes_become_blocks() -> None:
    block = 2 * cache(num_blocks=1).layout.block_bytes  # two layers
    assert cache(kv_bytes=10 * block + 1).num_blocks == 10
    assert cache(kv_bytes=5, num_blocks=3).num_blocks == 3
    assert cache().num_blocks == 2**30 // block


def test_too_little_memory_is_said() -> None:
    with pytest.raises(ConfigError, match="kv_bytes is 100: one block of 16 tokens takes 8192"):
        cache(kv_bytes=100)


@pytest.mark.parametrize("blocks", [10**12, 10**18])
def test_more_than_the_machine_has_is_said(blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"a KV cache of {blocks} blocks takes .* bytes, more"):
        cache(num_blocks=blocks)


def test_what_is_written_is_gathered() -> None:
    store = cache(num_blocks=4, block_size=2)
    kv = torch.randn(3, 2, 2, 16)
    slots = torch.tensor([[12, 14], [13, 15], [0, 2]])  # block 3, then the start of block 0
    store.write(1, slots, kv)
    keys, values = store.gather(1, torch.tensor([[[6, 0]], [[7, 1]]]))
    assert torch.equal(keys[0].transpose(0, 1)[:3], kv[:, 0])
    assert torch.equal(values[0].transpose(0, 1)[:3], kv[:, 1])
    assert not store.layers[0].any()
