"""Bytes that arrive in pieces and are joined once."""

from typing import Final

_SMALL: Final = 1024
"""Bytes below which a piece is copied behind the one before. An object of its own takes 33 bytes
and more: a peer that sends two bytes at a time would make the server hold twenty times as much."""


class Pieces:
    """Collects bytes; costs no copy of large pieces before the end, and little memory for small
    ones."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes | bytearray] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __len__(self) -> int:
        """Number of objects that are held."""
        return len(self._parts)

    def add(self, data: bytes) -> None:
        """Append `data`."""
        if len(data) >= _SMALL:
            self._parts.append(data)
        elif self._parts and isinstance(tail := self._parts[-1], bytearray):
            tail += data
        else:
            self._parts.append(bytearray(data))

    def clear(self) -> None:
        """Forget the bytes so far."""
        self._parts.clear()

    def take(self) -> bytes:
        """All bytes so far; nothing is left."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
