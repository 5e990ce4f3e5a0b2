"""The command's flags as one checked value; no model is loaded and no port is opened here.

Errors: `ConfigError`, `EventsUnusable`: one line each, which `main` shows as usage errors.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tandem_contract import environment, ports
from tandem_contract.chat_templates import CONFIG_FILE
from tandem_contract.commandline import settings_of
from tandem_contract.plan_keys import PlanKeys

from .config import EngineConfig, KvTransferConfig, parse_kv_transfer_config
from .events import KvEventsConfig, parse_kv_events_config
from .text import TOKENIZER_FILE
from .tiers.settings import parse_kv_storage_config
from .types import ConfigError

_WILDCARDS: Final = ("", "0.0.0.0", "::")
DEFAULT_BODY_LIMIT: Final = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags, checked. `main` takes the flags' defaults from here and from `EngineConfig`."""

    engine: EngineConfig
    names: tuple[str, ...]
    """Model names that requests may use; the first is the metrics' `model_name` label."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = ports.ENGINE_PREFILL
    """Port to listen on; 0 takes a free one."""
    events: KvEventsConfig | None = None
    """None: no KV cache events are published."""
    shutdown_timeout: float = 30.0
    """Seconds after a signal for running requests to finish and for held KV to be read. Too low:
    cut answers at every rollout; too high: a pod is killed before its drain has ended."""
    body_limit: int = DEFAULT_BODY_LIMIT
    """Largest request body in bytes. Too low: long prompts are refused with 413."""


def settings_from(flags: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> Settings:
    """The settings from `flags` (by parameter name) and the side channel's environment variables.

    Raises ConfigError, EventsUnusable.
    """
    _check_model(flags["model"])
    if not flags["enable_prefix_caching"]:
        raise ConfigError("--no-enable-prefix-caching: this engine always caches prefixes")
    names = flags["served_model_name"] or (str(flags["model"]),)
    events = flags["kv_events_config"]
    storage = flags["kv_storage_config"]
    engine = settings_of(
        EngineConfig,
        flags,
        served_model_name=names[0],
        num_blocks=flags["num_gpu_blocks_override"],
        kv_bytes=flags["kv_cache_memory_bytes"],
        kv_storage=(
            None if storage is None else parse_kv_storage_config(storage, flags["block_size"])
        ),
        kv_transfer=_kv_transfer(flags, env),
    )
    return settings_of(
        Settings,
        flags,
        engine=engine,
        names=names,
        events=parse_kv_events_config(events) if events is not None else None,
        body_limit=flags["max_body_bytes"],
    )


def _check_model(directory: Path) -> None:
    needs = f"config.json, {TOKENIZER_FILE} and *.safetensors (optional: {CONFIG_FILE})"
    if not directory.is_dir():
        raise ConfigError(f"--model {directory}: no such directory: give one with {needs}")
    for pattern in ("config.json", TOKENIZER_FILE, "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ConfigError(
                f"--model {directory}: no {pattern} there: a model directory needs {needs}"
            )


def _kv_transfer(flags: Mapping[str, Any], env: Mapping[str, str]) -> KvTransferConfig | None:
    """Readers cannot connect to a wildcard address: 127.0.0.1 replaces it as their default."""
    text, host, keys = flags["kv_transfer_config"], flags["host"], flags["transfer_key_dir"]
    if text is None:
        if keys is not None:
            raise ConfigError("--transfer-key-dir: no KV moves without --kv-transfer-config")
        return None
    port = env.get(environment.SIDE_CHANNEL_PORT) or str(ports.SIDE_CHANNEL)
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{environment.SIDE_CHANNEL_PORT}={port}: a port is 0 to 65535")
    fallback = "127.0.0.1" if host in _WILDCARDS else host
    config = parse_kv_transfer_config(
        text,
        side_channel_host=env.get(environment.SIDE_CHANNEL_HOST) or fallback,
        side_channel_port=int(port),
    )
    return replace(config, keys=_transfer_keys(keys))


def _transfer_keys(directory: Path | None) -> PlanKeys:
    try:
        return PlanKeys(directory)
    except ValueError as err:
        raise ConfigError(f"--transfer-key-dir: {err}") from err
    except OSError as err:
        raise ConfigError(f"--transfer-key-dir {directory}: {err.strerror}") from err
