"""The configuration file and the plan keys, loaded at start and again when they change.

Errors: `DocumentError` at the first load. Later, a file that cannot be used is logged with its
line, and the last good configuration stays in force.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tandem_contract.config import RouterConfig, router_config
from tandem_contract.documents import Document, DocumentError, load_documents, parse_documents
from tandem_contract.plan import load_keys

from ..backends.pods import DiscoveredBackend
from ..choice.routing import Routing
from ..llmd.plugins.config import load_routing

_TEXT: Final = "--config-text"
NO_GATES: Final[Mapping[str, bool]] = MappingProxyType({})

_log: Final = logging.getLogger(__name__)

_STARTED: Final = time.time()
"""Unix seconds: no file was read before this module was imported."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""Path, modification time in ns, size and inode of each file."""


@dataclass(frozen=True)
class Configuration:
    """A valid configuration file."""

    router: RouterConfig
    routing: Routing


def load(
    file: Path,
    environ: Mapping[str, str],
    *,
    lists_backends: bool | None = True,
    gates: Mapping[str, bool] = NO_GATES,
) -> Configuration:
    """Read and check `file`. Raises DocumentError.

    `lists_backends`: whether it must list the backends (static discovery) or must not; None: it
    may. `gates`: llm-d's feature gates that the command line sets: the file's entries of these
    gates do not count.
    """
    documents = load_documents(file)
    return read(documents, str(file), environ, lists_backends=lists_backends, gates=gates)


def load_text(
    text: str,
    environ: Mapping[str, str],
    *,
    lists_backends: bool,
    gates: Mapping[str, bool] = NO_GATES,
) -> Configuration:
    """Like `load`, from the configuration itself; empty: defaults. Raises DocumentError."""
    documents = parse_documents(text.strip() or "{}", _TEXT)
    return read(documents, _TEXT, environ, lists_backends=lists_backends, gates=gates)


def read(
    documents: Sequence[Document],
    file: str,
    environ: Mapping[str, str],
    *,
    lists_backends: bool | None,
    gates: Mapping[str, bool] = NO_GATES,
) -> Configuration:
    """The configuration in `documents` of `file`; `gates` as for `load`. Raises DocumentError."""
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        content = "backends" if lists_backends else "disaggregated_serving"
        raise DocumentError(f"{file}:1: expected one YAML mapping with {content}")
    router = router_config(documents[0], environ)
    if lists_backends and not router.backends:
        raise documents[0].error("backends", "the list is empty: name at least one backend")
    if router.backends and lists_backends is False:
        message = "backends come from the cluster: remove them, or use --discovery static"
        raise documents[0].error("backends", message)
    serving, resume = router.disaggregated_serving, router.resume.limits
    routing = load_routing(
        documents[0],
        router.extra,
        serving,
        resume,
        router.slo,
        flow=router.flow_control,
        gates=gates,
    )
    return Configuration(router, routing)


def listed_backends(configuration: Configuration) -> list[DiscoveredBackend]:
    """The backends that the file lists."""
    return [DiscoveredBackend(backend) for backend in configuration.router.backends]


def log_notices(configuration: Configuration) -> None:
    """Warn of each part of the file that its user would expect to have an effect."""
    for notice in configuration.routing.scheduling.notices:
        if notice.is_lost:
            _log.warning("%s", notice)
    offloading = configuration.router.kv_cache_index.storage_offloading
    if offloading.enabled and not configuration.routing.scheduling.tokenizers:
        _log.warning(
            "kv_cache_index.storage_offloading finds only prompts that come as token ids: list the "
            "plugin token-producer, so that text is tokenized"
        )


def log_unsent_settings(configuration: Configuration) -> None:
    """Warn of what the file asks of sidecars, of an EPP that has no keys and thus sends no plan."""
    serving = configuration.router.disaggregated_serving
    fields = {
        "disaggregated_serving.prefill_timeout": serving.prefill_timeout,
        "disaggregated_serving.kv_transfer_timeout": serving.kv_transfer_timeout,
        "resume": configuration.router.resume.limits,
    }
    for name, value in fields.items():
        if value is not None:
            _log.warning(
                "%s has no effect: it reaches the sidecars in signed plans, so give "
                "--plan-key-dir, here and to the sidecars, or set the sidecars' --%s",
                name,
                name.rpartition(".")[2].replace("_", "-"),
            )


class FileWatch:
    """Calls `on_change` on the event loop after the content of a file or directory changed.

    It polls: a ConfigMap's mount swaps a symbolic link above the file, which a file notification
    (inotify) on the file does not report.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[], None],
        interval: float = 1.0,
        read_after: float = _STARTED,
    ) -> None:
        """`interval` is in seconds. `read_after`: Unix seconds before the first reading of the file
        or directory. What changed later may have changed after it was read, so the first round
        calls `on_change`."""
        self._path, self._on_change, self._interval = path, on_change, interval
        self._stamp = () if _changed_at(path) >= read_after else _stamp(path)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                # Stored before the callback: a change during it is noticed in the next round.
                self._stamp = stamp
                self._on_change()


def reload(
    file: Path,
    environ: Mapping[str, str],
    *,
    lists_backends: bool = True,
    gates: Mapping[str, bool] = NO_GATES,
) -> Configuration | None:
    """Like `load`, but logs the error and returns None instead of raising it, and logs the
    notices."""
    try:
        configuration = load(file, environ, lists_backends=lists_backends, gates=gates)
    except DocumentError as err:
        _log.error("the configuration was not reloaded, the last good one stays: %s", err)
        return None
    _log.info("%s: reloaded", file)
    log_notices(configuration)
    return configuration


def reload_keys(directory: Path) -> dict[str, bytes] | None:
    """The plan keys; None, with the error logged, when they cannot be read or there is none: plans
    without a signature are followed by no sidecar that has keys."""
    try:
        if keys := load_keys(directory):
            return keys
        reason = f"{directory} has no key"
    except (OSError, ValueError) as err:
        reason = str(err)
    _log.error("the plan keys were not reloaded, the last good ones stay: %s", reason)
    return None


def _stamp(path: Path) -> Stamp:
    """Differs between two states of a file, or of the files of a directory."""
    return tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in _files(path))


def _changed_at(path: Path) -> float:
    """Unix seconds of the latest change of a file, or of the files of a directory."""
    return max((status.st_ctime for _, status in _files(path)), default=0.0)


def _files(path: Path) -> list[tuple[str, os.stat_result]]:
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [(str(file), file.stat()) for file in files]
    except OSError:
        # A missing file is a state of its own, so its return is a change.
        return []
