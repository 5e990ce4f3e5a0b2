"""`--kv-storage-config`: where KV lies beyond the GPU, as one checked value.

Errors: `ConfigError`, without any key in its text.
"""

from pathlib import Path

import msgspec

from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import (
    DEFAULT_NAMESPACE,
    StoreCredentials,
    StoreLocation,
    store_location,
)

from ..types import ConfigError


class KvStorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON object of the flag. Keys of a store are never in it: every user of the machine can
    read a command line."""

    endpoint: str | None = None
    """URL of the store: http://, https:// or file:///. None: host memory only."""
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
    host_bytes: int = 0
    """Bytes of host memory for chunks; 0: none are kept there."""
    pending_bytes: int = 1 << 29
    """Bytes of chunks that may wait to be written. Too low: chunks are not stored under load."""
    capacity_bytes: int = 0
    """Bytes of the namespace, above which the least recently used chunks are deleted; 0: the store
    bounds itself."""
    max_age_seconds: float = 7 * 86400.0
    """Age since the last use at which chunks are deleted; only with capacity_bytes."""

    def location(self) -> StoreLocation | None:
        """The store, or None. Raises ConfigError."""
        if self.endpoint is None:
            return None
        directory = self.credentials_dir
        try:
            return store_location(
                self.endpoint,
                self.kv_namespace,
                protocol=self.protocol,
                credentials=StoreCredentials(directory=Path(directory)) if directory else None,
                region=self.region,
                virtual_host_style=self.virtual_host_style,
                ca_file=Path(self.ca_file) if self.ca_file else None,
            )
        except LocationError as err:
            raise ConfigError(f"--kv-storage-config: {err}") from err


def parse_kv_storage_config(text: str, block_size: int) -> KvStorageConfig:
    """Parse and check the flag's JSON. Raises ConfigError."""
    try:
        config = msgspec.json.decode(text, type=KvStorageConfig)
    except (msgspec.MsgspecError, UnicodeEncodeError) as err:
        raise ConfigError(f"--kv-storage-config: {err}") from err
    if config.chunk_tokens < 1 or config.chunk_tokens % block_size:
        raise ConfigError(
            f"--kv-storage-config: chunk_tokens {config.chunk_tokens} must be a multiple of "
            f"--block-size {block_size}"
        )
    if min(config.host_bytes, config.pending_bytes, config.capacity_bytes) < 0:
        raise ConfigError("--kv-storage-config: a number of bytes is negative")
    if config.endpoint is None and not config.host_bytes:
        raise ConfigError("--kv-storage-config: give an endpoint, host_bytes or both")
    config.location()
    return config
