"""What every engine is told of its store: the common fields of the engines' settings."""

from pathlib import Path

import msgspec

from .bounds_file import BoundsFile, BoundsReader
from .format.collection import Bounds
from .location import DEFAULT_NAMESPACE, StoreCredentials, StoreLocation, store_location


class EngineStoreSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Read from JSON. Keys of a store are never in it: every user of the machine can read a command
    line."""

    kv_namespace: str = DEFAULT_NAMESPACE
    protocol: str | None = None
    """s3, http or file, where the endpoint and the credentials do not tell."""
    credentials_dir: str | None = None
    """Directory with the files access_key and secret_key; None: none, or AWS's default chain."""
    region: str = "us-east-1"
    virtual_host_style: bool = False
    ca_file: str | None = None
    chunk_tokens: int = 256
    """Tokens of a chunk, a multiple of the block size. Smaller: more of a prompt's end is found,
    with more requests to the store. All engines that share KV need the same."""
    pending_bytes: int = 1 << 29
    """Bytes of chunks that may wait to be written, for each process that writes. Too low: chunks
    are not stored under load. Too high: host memory."""
    capacity_bytes: int = 0
    """Bytes of the namespace, above which the least recently used chunks are deleted; 0: the store
    bounds itself."""
    max_age_seconds: float = 7 * 86400.0
    """Age since the last use at which chunks are deleted; only with capacity_bytes."""
    bounds_file: str | None = None
    """JSON file with these two, which is read again while the engine runs and wins over them."""

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
        """Reads the bounds of the namespace; None: the engines keep none, now or later."""
        stated = Bounds(self.capacity_bytes, self.max_age_seconds) if self.capacity_bytes else None
        if self.bounds_file is not None:
            return BoundsFile(Path(self.bounds_file), stated, self.max_age_seconds).read
        return (lambda: stated) if stated is not None else None

    def fault(self, block_size: int) -> str | None:
        """What is wrong with the numbers, for an engine with blocks of `block_size` tokens; None:
        nothing."""
        if self.chunk_tokens < 1 or self.chunk_tokens % block_size:
            return (
                f"chunk_tokens {self.chunk_tokens} must be a multiple of --block-size {block_size}"
            )
        if min(self.pending_bytes, self.capacity_bytes) < 0:
            return "a number of bytes is negative"
        return None
