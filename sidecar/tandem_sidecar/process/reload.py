"""Follows the file of `--config`: what may change while requests run does, the rest waits.

Errors: `BadConfiguration`: the command line cannot be used as it would be read now; the settings
that are stay.
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

LOOK_SECONDS: Final = 1.0
"""Between looks at the file. One that differs is read when the next look finds it the same: who
writes it in place is not overtaken."""

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
        "max_body",
        "max_connections",
        "breaker_failures",
        "breaker_cooldown",
        "tokenize_once",
        "history",
        "log_format",
        "log_level",
    }
)
"""Flags that may change while requests run; a request keeps what it began with."""

Flags = Mapping[str, Any]
"""The parsed command line, by parameter name."""


class BadConfiguration(ValueError):
    """The message says where and what, in one line."""


@dataclass(frozen=True, slots=True)
class Source:
    """The command line, and how to read it again."""

    file: Path | None
    """Of `--config`."""
    flags: Flags
    read: Callable[[], Flags]
    """Parse the same arguments, environment and file anew. Raises BadConfiguration."""
    build: Callable[[Flags], Settings]
    """Raises BadConfiguration."""


@dataclass(frozen=True, slots=True)
class Change:
    """What another reading of the command line changes."""

    flags: Flags
    """Those to hold now."""
    live: tuple[str, ...]
    """Names of the ones that change."""
    waiting: tuple[str, ...]
    """Names of the ones that would, at a restart."""


def compare(old: Flags, new: Flags) -> Change:
    """What may be taken over of `new`."""
    differing = sorted(name for name in new if new[name] != old[name])
    live = tuple(name for name in differing if name in LIVE)
    waiting = tuple(name for name in differing if name not in LIVE)
    return Change({**old, **{name: new[name] for name in live}}, live, waiting)


class Reloader:
    """Holds the flags in force; `apply` is given the settings when they change."""

    def __init__(
        self, source: Source, apply: Callable[[Settings], None], *, level: int = logging.INFO
    ) -> None:
        self._source = source
        self._apply = apply
        self._level = level
        self._flags = source.flags
        self._read = self._seen = self._look()

    def reload(self) -> None:
        """Read now, and say in one line what became of it."""
        self._read = self._look()
        try:
            new = self._source.read()
            change = compare(self._flags, new)
            settings = self._source.build(change.flags)
        except BadConfiguration as err:
            log.error("settings not reloaded, the old ones stay: %s", err)
            return
        log.log(self._level, "%s", _said(self._flags, new, change))
        self._flags = change.flags
        if change.live:
            self._apply(settings)

    async def watch(self) -> None:
        """Reload when the file is another, for ever."""
        while self._source.file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Reload if the file is another than the one read and the same as at the last look."""
        last, self._seen = self._seen, self._look()
        if self._seen == last != self._read:
            self.reload()

    def _look(self) -> tuple[int, int, int] | None:
        """What tells one file from the next, through a ConfigMap's links; None: it is not there."""
        if self._source.file is None:
            return None
        try:
            status = self._source.file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _said(old: Flags, new: Flags, change: Change) -> str:
    parts = [_flag(name) + _moved(old[name], new[name]) for name in change.live]
    said = "settings reloaded: " + (", ".join(parts) or "nothing changes")
    if change.waiting:
        said += "; not before a restart: " + ", ".join(_flag(name) for name in change.waiting)
    return said


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _moved(old: object, new: object) -> str:
    return f" {_text(old)} -> {_text(new)}" if isinstance(new, int | float | str) else ""


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_duration(value) if isinstance(value, float) else str(value)
