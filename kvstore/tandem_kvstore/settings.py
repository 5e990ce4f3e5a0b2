"""Settings of a store that the torch engine and vLLM's connector have in common."""

from pathlib import Path

import msgspec

from .bounds_file import BoundsFile, BoundsReader
from .format.collection import Bounds
from .location import (
    DEFAULT_NAMESPACE,
    DEFAULT_REGION,
    StoreCredentials,
    StoreLocation,
    store_location,
)


class EngineStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Read from JSON. It never has the store's keys: every user of the machine can read a command
    line."""

    kv_namespace: str = DEFAULT_NAMESPACE
    protocol: str | None = None
    """s3, http or file. None: by the endpoint and the credentials, see `location`."""
    credentials_dir: str | None = None
    """Directory with the files access_key and secret_key. None: no keys, or with protocol s3
    those of AWS's default chain."""
    region: str = DEFAULT_REGION
    virtual_host_style: bool = False
    ca_file: str | None = None
    chunk_tokens: int = 256
    """Tokens of a chunk, a multiple of the block size, the same on all engines that share KV.
    Smaller: more of a prompt's end is stored, with more requests to the store."""
    pending_bytes: int = 1 << 29
    """Bytes of chunks that may wait to be written, for each process that writes. Too low: chunks
    are not stored under load. Too high: they fill the host's memory while the store is slow."""
    capacity_bytes: int = 0
    """Bytes of the namespace above which the least recently used chunks are deleted. 0: engines
    delete nothing, the store bounds itself."""
    max_age_seconds: float = 7 * 86400.0
    """Seconds since its last use after which a chunk is deleted; only with capacity_bytes."""
    bounds_file: str | None = None
    """JSON file with these two fields, which overrides them and is read again while the engine
    runs; see `bounds_file`."""

    def location_of(self, endpoint: str) -> StoreLocation:
        """The store at `endpoint`. Raises LocationError."""
        directory = self.credentials_dir
        return store_location(
            endpoint,
            self.kv_namespace,
            protocol=self.protocol,
            credentials=StoreCredentials(directory=Path(directory)) if directory else None,
            region=self.region,
            virtual_host_style=self.virtual_host_style,
            ca_file=Path(self.ca_file) if self.ca_file else None,
        )

    def bounds_reader(self) -> BoundsReader | None:
        """Returns the namespace's bounds when it is called. None: this engine never has any."""
        bounds = Bounds(self.capacity_bytes, self.max_age_seconds) if self.capacity_bytes else None
        if self.bounds_file is not None:
            return BoundsFile(Path(self.bounds_file), bounds, self.max_age_seconds).read
        return (lambda: bounds) if bounds is not None else None

    def fault(self, block_size: int) -> str | None:
        """What is wrong with these settings for an engine with blocks of `block_size` tokens; None
        if they are right."""
        if self.chunk_tokens < 1 or self.chunk_tokens % block_size:
            return (
                f"chunk_tokens {self.chunk_tokens} must be a multiple of --block-size {block_size}"
            )
        if min(self.pending_bytes, self.capacity_bytes) < 0:
            return "a number of bytes is negative"
        if self.max_age_seconds <= 0:
            return "max_age_seconds must be above 0"
        return None
