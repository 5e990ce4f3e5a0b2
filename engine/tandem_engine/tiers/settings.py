"""`--kv-storage-config`: where KV lies beyond the GPU, as one checked value.

Errors: `ConfigError`, without any key in its text.
"""

import msgspec

from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import StoreLocation
from tandem_kvstore.settings import EngineStoreSettings

from ..types import ConfigError


class KvStorageConfig(EngineStoreSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON object of the flag."""

    endpoint: str | None = None
    """URL of the store: http://, https:// or file:///. None: host memory only."""
    host_bytes: int = 0
    """Bytes of host memory for chunks; 0: none are kept there."""

    def location(self) -> StoreLocation | None:
        """The store, or None. Raises ConfigError."""
        try:
            return self.location_of(self.endpoint) if self.endpoint is not None else None
        except LocationError as err:
            raise ConfigError(f"--kv-storage-config: {err}") from err


def parse_kv_storage_config(text: str, block_size: int) -> KvStorageConfig:
    """Parse and check the flag's JSON. Raises ConfigError."""
    try:
        config = msgspec.json.decode(text, type=KvStorageConfig)
    except (msgspec.MsgspecError, UnicodeEncodeError) as err:
        raise ConfigError(f"--kv-storage-config: {err}") from err
    if (fault := config.fault(block_size)) is not None:
        raise ConfigError(f"--kv-storage-config: {fault}")
    if config.host_bytes < 0:
        raise ConfigError("--kv-storage-config: a number of bytes is negative")
    if config.endpoint is None and not config.host_bytes:
        raise ConfigError("--kv-storage-config: give an endpoint, host_bytes or both")
    config.location()
    return config
