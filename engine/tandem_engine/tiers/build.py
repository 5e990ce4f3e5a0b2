"""Builds the tiers that `--kv-storage-config` asks for."""

import asyncio
from collections.abc import Callable

from tandem_kvstore.client import StoreClient
from tandem_kvstore.collector import OnRemoved
from tandem_kvstore.errors import LocationError
from tandem_kvstore.format.identity import KvIdentity
from tandem_kvstore.open_client import open_client
from tandem_kvstore.weights import weights_hash

from ..blocks import BlockManager
from ..config import EngineConfig
from ..observer import EngineObserver
from ..runner import Runner
from ..types import ConfigError
from ..weights import architecture_json, tensor_files
from .chunk_memory import LAYOUT, ChunkMemory
from .device_chunks import DeviceChunks
from .kv_tiers import KvTiers
from .loads import OnLoadEnd
from .no_tiers import NO_TIERS, NoTiers
from .settings import KvStorageConfig

Tiers = KvTiers | NoTiers


def storage_identity(config: EngineConfig, runner: Runner, storage: KvStorageConfig) -> KvIdentity:
    """What the engine's KV depends on beside the prompt. Reads all weights unless their digest is
    cached. Raises ModelError, OSError."""
    layout = runner.cache.layout
    return KvIdentity(
        weights=weights_hash(tensor_files(config.model)),
        dtype=layout.dtype,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        chunk_tokens=storage.chunk_tokens,
        layout=LAYOUT,
        overrides=architecture_json(runner.model_config),
        engine="tandem-engine",
    )


async def open_tiers(
    config: EngineConfig,
    runner: Runner,
    blocks: BlockManager,
    observer: EngineObserver,
    on_end: OnLoadEnd,
    *,
    wake: Callable[[], None],
) -> Tiers:
    """The tiers, started; NO_TIERS without a configuration.

    Raises ConfigError when the credentials or the authority's certificate cannot be read, and
    ModelError and OSError when the weights cannot be.
    """
    if (storage := config.kv_storage) is None:
        return NO_TIERS
    # In a thread: weights whose digest is not cached take a second per gigabyte.
    identity = await asyncio.to_thread(storage_identity, config, runner, storage)
    cache = runner.cache
    memory = ChunkMemory(cache.layers, cache.layout, storage.chunk_tokens, cache.written)
    tiers = KvTiers(
        DeviceChunks(memory, identity, blocks.block_size),
        blocks,
        observer,
        on_end,
        wake=wake,
        host_bytes=storage.host_bytes,
        pending_bytes=storage.pending_bytes,
        client=_client(
            *(storage, identity, memory, observer),
            # The tiers are made after their client.
            on_removed=lambda keys: tiers.remove_stored(keys),  # noqa: PLW0108
        ),
    )
    return tiers


def _client(
    storage: KvStorageConfig,
    identity: KvIdentity,
    memory: ChunkMemory,
    observer: EngineObserver,
    *,
    on_removed: OnRemoved,
) -> StoreClient | None:
    if (location := storage.location()) is None:
        return None
    bounds = storage.bounds_reader()
    try:
        # The collector runs from the next await on, when the tiers are there.
        return open_client(
            *(location, identity, observer),
            chunk_bytes=memory.chunk_bytes,
            bounds=bounds,
            on_removed=on_removed,
        )
    except LocationError as err:
        raise ConfigError(f"--kv-storage-config: {err}") from err
