"""What comes from files, the router's YAML and the plan keys, read anew when they change; and which
pods to serve with where these come from a cluster (`cluster`).

Errors: `DocumentError` at the first load; later a file that cannot be used is logged with its line
and the configuration in force stays.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tandem_contract.config import DisaggregatedServing, RouterConfig, router_config
from tandem_contract.documents import DocumentError, load_documents
from tandem_contract.plan import load_keys

from .scheduling.config import Scheduling, load_scheduling

_log: Final = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Routing:
    """What the configuration decides."""

    serving: DisaggregatedServing
    scheduling: Scheduling


@dataclass(frozen=True)
class Loaded:
    """A configuration file that holds together."""

    config: RouterConfig
    routing: Routing


def load(file: Path, environ: Mapping[str, str], *, listed: bool = True) -> Loaded:
    """Read and check `file`; `listed`: whether it lists the backends. Raises DocumentError."""
    documents = load_documents(file)
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        holds = "backends" if listed else "disaggregated_serving"
        raise DocumentError(f"{file}:1: expected one YAML mapping with {holds}")
    config = router_config(documents[0], environ)
    if listed and not config.backends:
        raise documents[0].error("backends", "there are none: list at least one backend")
    if config.backends and not listed:
        message = "backends come from the cluster: remove them, or use --discovery static"
        raise documents[0].error("backends", message)
    scheduling = load_scheduling(documents[0], config.extra, config.disaggregated_serving)
    return Loaded(config, Routing(config.disaggregated_serving, scheduling))


class Watch:
    """Calls `changed` after a path's content moved, on the event loop; polls, as a ConfigMap's
    mount swaps a link above the file, which notifications on the file do not see."""

    def __init__(self, path: Path, changed: Callable[[], None], interval: float = 1.0) -> None:
        self._path, self._changed, self._interval = path, changed, interval
        self._stamp = _stamp(path)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._changed()


def reload(file: Path, environ: Mapping[str, str], *, listed: bool = True) -> Loaded | None:
    """As `load`, but None with its error logged."""
    try:
        loaded = load(file, environ, listed=listed)
    except DocumentError as err:
        _log.error("the configuration stays as it was: %s", err)
        return None
    _log.info("%s: loaded", file)
    return loaded


def reload_keys(directory: Path) -> dict[str, bytes] | None:
    """The plan keys, or None with the error logged."""
    try:
        return load_keys(directory)
    except (OSError, ValueError) as err:
        _log.error("the plan keys stay as they were: %s", err)
        return None


def _stamp(path: Path) -> Stamp:
    """What tells two states of a file, or of a directory's files, apart."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats)
