"""Reads the config.json files that `modelConfigs` of predicted-cost names.

Errors: `DocumentError` with the line of the entry: the file is missing, is not JSON, or does not
describe a model whose KV size can be computed.
"""

from pathlib import Path
from typing import Any

import msgspec

from tandem_contract.documents import Document
from tandem_planner.kv_size import KvSize, kv_size
from tandem_planner.model_config import UnknownModelConfig, model_config

from .parameters import CostParameters


def load_kv_sizes(document: Document, path: str, parameters: CostParameters) -> dict[str, KvSize]:
    """Model → size of its KV; `path`: where the plugin stands in `document`. Raises DocumentError.

    A directory stands for the config.json in it.
    """
    sizes = {}
    for model, name in parameters.modelConfigs.items():
        file = Path(name)
        file = file / "config.json" if file.is_dir() else file
        try:
            fields = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
            sizes[model] = kv_size(model_config(fields), parameters.kvCacheDtype)
        except (OSError, msgspec.MsgspecError, UnknownModelConfig) as err:
            where = f"{path}.parameters.modelConfigs"
            raise document.error(where, f"{model}: {file}: {err}") from err
    return sizes
