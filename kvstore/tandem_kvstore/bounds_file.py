"""Bounds of a namespace in a JSON file that may change while the engine runs.

    {"capacity_bytes": 2000000000000, "max_age_seconds": 604800.0}

Each field may be left out. A file without fields means that nothing is deleted.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from .errors import UNREADABLE
from .format.collection import Bounds

_log = logging.getLogger(__name__)

BoundsReader = Callable[[], Bounds | None]
"""Returns the bounds that hold now. None: nothing is deleted."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_age_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class BoundsFile:
    """The bounds in a file. While the file cannot be read or parsed, those of the last successful
    read hold."""

    def __init__(self, path: Path, initial: Bounds | None, default_age: float) -> None:
        """`initial`: bounds until the file has been read. `default_age`: seconds, for a file that
        has only a capacity."""
        self._path, self._default_age = path, default_age
        self._bounds = initial
        self._text: bytes | None = None

    def read(self) -> Bounds | None:
        """Read the file and return its bounds. The collector calls this once in each round."""
        try:
            text = self._path.read_bytes()
        except OSError as err:
            # Compared below like a content, so that one failure is logged once.
            text = str(err).encode()
        if text == self._text:
            return self._bounds
        self._text = text
        try:
            content = msgspec.json.decode(text, type=_Content)
        except UNREADABLE as err:
            _log.warning(
                "bounds file %s cannot be used: %s; the bounds stay as they were: %s",
                *(self._path, err, self._bounds or "none"),
            )
            return self._bounds
        self._bounds = self._bounds_of(content)
        _log.info(
            "bounds file %s was read; the bounds of the store are: %s",
            self._path,
            self._bounds or "none",
        )
        return self._bounds

    def _bounds_of(self, content: _Content) -> Bounds | None:
        age = content.max_age_seconds
        if content.capacity_bytes > 0:
            return Bounds(content.capacity_bytes, self._default_age if age is None else age)
        return Bounds(sys.maxsize, age) if age is not None else None
