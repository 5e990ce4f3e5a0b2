"""Bounds of a namespace in a file that changes while the engine runs.

    {"capacity_bytes": 2000000000000, "max_age_seconds": 604800.0}

Both may be left out; without both, the engine keeps no bounds.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from .format.collection import Bounds

_log = logging.getLogger(__name__)

BoundsReader = Callable[[], Bounds | None]
"""The bounds that hold now; None: none, so nothing is deleted."""


class _Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_bytes: int = 0
    max_age_seconds: float | None = None


class BoundsFile:
    """Reads the file in each call, which is once in a round of the collector.

    While it cannot be read, or is no such JSON, what was read last holds.
    """

    def __init__(self, path: Path, stated: Bounds | None, default_age: float) -> None:
        """`stated`: holds until the file was read. `default_age`: seconds, where a file has only a
        capacity."""
        self._path, self._default_age = path, default_age
        self._bounds = stated
        self._text: bytes | None = None

    def read(self) -> Bounds | None:
        """The present bounds."""
        try:
            text = self._path.read_bytes()
        except OSError as err:
            text = str(err).encode()
        if text == self._text:
            return self._bounds
        self._text = text
        try:
            stated = msgspec.json.decode(text, type=_Stated)
        except msgspec.MsgspecError as err:
            _log.warning(
                "bounds file %s cannot be used: %s; the engine keeps the bounds it had: %s",
                *(self._path, err, self._bounds or "none"),
            )
            return self._bounds
        self._bounds = self._bounds_of(stated)
        _log.info(
            "bounds file %s was read; the bounds of the store are: %s",
            self._path,
            self._bounds or "none",
        )
        return self._bounds

    def _bounds_of(self, stated: _Stated) -> Bounds | None:
        age = stated.max_age_seconds
        if stated.capacity_bytes > 0:
            return Bounds(stated.capacity_bytes, self._default_age if age is None else age)
        return Bounds(sys.maxsize, age) if age is not None else None
