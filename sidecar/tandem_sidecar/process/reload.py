"""Reloads the file of `--config` when it changes, or at SIGHUP.

Flags in `LIVE` change at once, for requests that begin afterwards. Changes of all other flags are
logged and take effect at the next start.

Errors: `BadConfiguration`: the file, the environment or the flags are invalid now; the current
settings stay in use.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem_contract.durations import format_duration

from ..settings import Settings

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 1.0
"""Seconds between checks of the file. A changed file is read when it was the same at two checks in
a row, so that a file which is being written in place is not read half."""

LIVE: Final = frozenset(
    {
        "prefill_timeout",
        "prefill_grace",
        "kv_transfer_timeout",
        "push_timeout",
        "silence_timeout",
        "drain_timeout",
        "fallback_to_unified",
        "retries",
        "prefill_allow",
        "api_path",
        "max_body",
        "max_connections",
        "breaker_failures",
        "breaker_cooldown",
        "tokenize_once",
        "stream_kv",
        "resume",
        "history",
        "log_format",
        "log_level",
    }
)
"""Flags that may change while requests run; a request keeps the values it began with."""

Flags = Mapping[str, Any]
"""The parsed command line, by parameter name."""


class BadConfiguration(ValueError):
    """The message names file, line or flag, and the fault, in one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """The command line, and functions to read it again."""

    file: Path | None
    """The file of `--config`; None: without one, nothing is followed."""
    flags: Flags
    read: Callable[[], Flags]
    """Parse the same arguments, environment and file again. Raises BadConfiguration."""
    build: Callable[[Flags], Settings]
    """Make settings of parsed flags. Raises BadConfiguration."""


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the flags in use and those read again."""

    flags: Flags
    """The flags to use now."""
    live: tuple[str, ...]
    """Names of the flags that change now."""
    waiting: tuple[str, ...]
    """Names of the flags that would change at a restart."""


def compare(old: Flags, new: Flags) -> Change:
    """The flags that differ between `old` and `new`, by whether they apply at once."""
    changed = sorted(name for name in new if new[name] != old[name])
    # A flag that waits keeps its old value here, so that every reload reports it until a restart.
    live = tuple(name for name in changed if name in LIVE)
    waiting = tuple(name for name in changed if name not in LIVE)
    return Change({**old, **{name: new[name] for name in live}}, live, waiting)


class Reloader:
    """Keeps the flags in use; calls `apply` with the new settings when they change."""

    def __init__(
        self, source: Source, apply: Callable[[Settings], None], *, level: int = logging.INFO
    ) -> None:
        """`level`: the log level of the line about a reload."""
        self._source = source
        self._apply = apply
        self._level = level
        self._flags = source.flags
        self._loaded = self._last = self._file_version()
        """Versions of the file: the one read last, and the one at the last check."""

    def reload(self) -> None:
        """Read the configuration now, and log in one line what changes."""
        # Noted before reading: a write during the read is then another version, and read again.
        self._loaded = self._file_version()
        try:
            new = self._source.read()
            change = compare(self._flags, new)
            # Built before anything is applied: contradicting flags change nothing.
            settings = self._source.build(change.flags)
        except BadConfiguration as err:
            log.error("settings not reloaded, the current ones stay in use: %s", err)
            return
        log.log(self._level, "%s", _summary(self._flags, new, change))
        self._flags = change.flags
        if change.live:
            self._apply(settings)

    async def follow(self) -> None:
        """Check the file every `CHECK_SECONDS`, forever."""
        while self._source.file is not None:
            await asyncio.sleep(CHECK_SECONDS)
            self.check()

    def check(self) -> None:
        """Reload if the file has changed since it was read, and not since the last check."""
        previous, self._last = self._last, self._file_version()
        if self._last == previous != self._loaded:
            self.reload()

    def _file_version(self) -> tuple[int, int, int] | None:
        """Inode, modification time and size; None: the file does not exist.

        Follows symbolic links: a mounted ConfigMap changes by replacing the link to its directory.
        """
        if self._source.file is None:
            return None
        try:
            status = self._source.file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _summary(old: Flags, new: Flags, change: Change) -> str:
    changes = [_flag(name) + _from_to(old[name], new[name]) for name in change.live]
    summary = "settings reloaded: " + (", ".join(changes) or "nothing changes")
    if change.waiting:
        summary += "; not before a restart: " + ", ".join(_flag(name) for name in change.waiting)
    return summary


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _from_to(old: object, new: object) -> str:
    """` OLD -> NEW` for values with a short text; empty for the others, such as allow-lists."""
    return f" {_text(old)} -> {_text(new)}" if isinstance(new, int | float | str) else ""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_duration(value) if isinstance(value, float) else str(value)
