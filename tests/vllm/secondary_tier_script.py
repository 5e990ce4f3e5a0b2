"""Runs in vLLM's environment: the secondary tier, made by vLLM's factory and driven as vLLM does.

    python secondary_tier_script.py DIRECTORY

The rows of host memory are of this process: the tier's interface needs no GPU.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

ROWS, SIZE = 4, 4096
KEYS = [make_offload_key(bytes([i]) * 32, 0) for i in range(2)]


def make_tier(
    directory: Path, rows: np.ndarray, weights: str | None = "commit", *, has_events: bool = False
) -> Any:
    """A tier from the configuration that docs/run/storage.md shows."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=SIZE,
        enable_kv_cache_events=has_events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="NHD",
    )
    tier = {
        "type": "TandemSecondaryTier",
        "module_path": "tandem_vllm_storage.secondary_tier",
        "endpoint": f"file://{directory}",
        **({"weights": weights} if weights else {}),
    }
    spec = SimpleNamespace(config=config)
    return SecondaryTierFactory.create_secondary_tier(tier, memoryview(rows), spec)


def run(tier: Any, is_load: bool, rows: list[int]) -> bool:
    """One job with both keys; returns whether it succeeded."""
    job = TransferJob(1, KEYS, np.array(rows), is_load, None)
    (tier.submit_load if is_load else tier.submit_store)(job)
    assert tier.has_pending_work()
    tier.drain_jobs()
    [result] = tier.get_finished_jobs()
    assert (len(result.successful_keys) == len(KEYS)) == result.success
    return bool(result.success)


def answer(tier: Any, key: bytes) -> LookupResult:
    while (result := tier.lookup(key, None)) is LookupResult.RETRY:
        time.sleep(0.001)
    return result


def main(directory: Path) -> None:
    written = np.random.default_rng(1).integers(0, 255, (ROWS, SIZE), np.uint8)
    first = make_tier(directory, written, has_events=True)
    assert answer(first, KEYS[0]) is LookupResult.MISS
    assert run(first, False, [2, 3])
    [event] = first.take_events()
    assert (event.keys, event.medium, event.removed) == (KEYS, Medium.STORAGE, False)
    assert not first.take_events()
    first.shutdown()

    read = np.zeros((ROWS, SIZE), np.uint8)
    second = make_tier(directory, read)
    # A look-up and a load have limits in seconds, which a busy machine can miss.
    for key in KEYS:
        while answer(second, key) is not LookupResult.HIT:
            pass
    while not run(second, True, [0, 1]):
        pass
    assert run(second, False, [0, 1])
    assert not second.take_events()
    assert (read[:2] == written[2:]).all()
    assert not read[2:].any()

    other = make_tier(directory, read, "other weights")
    assert answer(other, KEYS[0]) is LookupResult.MISS
    other.shutdown()

    # Data of chunks this small follow the manifest, which a hash names.
    for path in directory.rglob("?" * 64):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    read[:] = 0
    assert not run(second, True, [0, 1])
    assert not read.any()
    second.shutdown()

    message = ""
    try:
        make_tier(directory, read, None)
    except ValueError as err:
        message = str(err)
    assert "set weights to the commit" in message


if __name__ == "__main__":
    main(Path(sys.argv[1]))
