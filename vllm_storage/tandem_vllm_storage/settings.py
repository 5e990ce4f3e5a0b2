"""`kv_connector_extra_config` of the connector, as one checked value.

Errors: `StorageConfigError`, without any key of a store in its text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import (
    DEFAULT_NAMESPACE,
    StoreCredentials,
    StoreLocation,
    store_location,
)

_WHERE: Final = "TandemStorageConnector, kv_connector_extra_config"


class StorageConfigError(ValueError):
    """vLLM must not start with this configuration; the message says what to change."""


class StorageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields mean what those of the torch engine's `--kv-storage-config` mean."""

    endpoint: str
    kv_namespace: str = DEFAULT_NAMESPACE
    protocol: str | None = None
    credentials_dir: str | None = None
    region: str = "us-east-1"
    virtual_host_style: bool = False
    ca_file: str | None = None
    chunk_tokens: int = 256
    """Tokens of a chunk, a multiple of vLLM's block size; the same on all engines that share KV."""
    pending_bytes: int = 1 << 29
    """Bytes of chunks that may wait to be written, for each worker. Too low: chunks are not stored
    under load. Too high: host memory."""
    capacity_bytes: int = 0
    """Bytes of the namespace above which the engines delete chunks; 0: the store bounds itself."""
    max_age_seconds: float = 7 * 86400.0
    """Age since the last use at which chunks are deleted; only with capacity_bytes."""
    weights: str | None = None
    """Commit or digest that names the weights' bytes. None: hash of the model's files. Wrong: this
    engine uses KV of other weights and answers wrongly."""

    def location(self) -> StoreLocation:
        """The store. Raises StorageConfigError."""
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
            raise StorageConfigError(f"{_WHERE}: {err}") from err


def parse_settings(extra_config: Mapping[str, Any], block_size: int) -> StorageSettings:
    """The checked settings. Raises StorageConfigError."""
    try:
        settings = msgspec.convert(dict(extra_config), StorageSettings)
    except msgspec.ValidationError as err:
        raise StorageConfigError(f"{_WHERE}: {err}") from err
    if settings.chunk_tokens < 1 or settings.chunk_tokens % block_size:
        raise StorageConfigError(
            f"{_WHERE}: chunk_tokens {settings.chunk_tokens} must be a multiple of vLLM's "
            f"--block-size {block_size}"
        )
    if min(settings.pending_bytes, settings.capacity_bytes) < 0:
        raise StorageConfigError(f"{_WHERE}: a number of bytes is negative")
    if settings.weights == "":
        raise StorageConfigError(f"{_WHERE}: weights is empty: leave it out, or name a commit")
    settings.location()
    return settings
