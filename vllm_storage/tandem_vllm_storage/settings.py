"""`kv_connector_extra_config` of the connector, checked.

Errors: `StorageConfigError`, whose text never contains a store's key.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tandem_kvstore.errors import LocationError
from tandem_kvstore.location import StoreLocation
from tandem_kvstore.settings import EngineStoreSettings

_WHERE: Final = "TandemStorageConnector, kv_connector_extra_config"


class StorageConfigError(ValueError):
    """vLLM must not start with this configuration; the message says what to change."""


class StorageSettings(EngineStoreSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of the store, and the name of the model's weights."""

    endpoint: str
    weights: str | None = None
    """Commit or digest of the weights. None: the commit of a snapshot, else the hash of the files.
    If it is wrong, the engine loads KV of other weights and gives wrong answers."""

    def location(self) -> StoreLocation:
        """The store. Raises StorageConfigError."""
        try:
            return self.location_of(self.endpoint)
        except LocationError as err:
            raise StorageConfigError(f"{_WHERE}: {err}") from err


def parse_settings(extra_config: Mapping[str, Any], block_size: int) -> StorageSettings:
    """The checked settings. Raises StorageConfigError."""
    try:
        settings = msgspec.convert(dict(extra_config), StorageSettings)
    except msgspec.ValidationError as err:
        raise StorageConfigError(f"{_WHERE}: {err}") from err
    if (fault := settings.fault(block_size)) is not None:
        raise StorageConfigError(f"{_WHERE}: {fault}")
    if settings.weights == "":
        raise StorageConfigError(f"{_WHERE}: weights is empty: leave it out, or name a commit")
    settings.location()
    return settings
