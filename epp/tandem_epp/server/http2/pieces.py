"""Bytes that arrive in pieces and become one object."""

from io import BytesIO
from typing import Final

_SMALL: Final = 1024
"""Bytes below which a piece is copied behind the one before. An object of its own takes 33 bytes
and more: a peer that sends two bytes at a time would make the server hold twenty times as much."""
LARGE: Final = 1 << 20
"""Bytes from which pieces are joined as they come: to join 16 MB at the end would take 10 ms, most
of them for memory that the kernel clears, in which nothing else runs."""


class Pieces:
    """Collects bytes; costs one copy of large pieces, and little memory for small ones."""

    __slots__ = ("_buffer", "_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes | bytearray] = []
        self._buffer: BytesIO | None = None
        """What was joined of more than `LARGE` bytes."""
        self.size = 0
        """Bytes so far."""

    def __bool__(self) -> bool:
        return self.size > 0

    def __len__(self) -> int:
        """Number of objects that are held."""
        return len(self._parts) + (self._buffer is not None)

    def add(self, data: bytes) -> None:
        """Append `data`."""
        self.size += len(data)
        if self._buffer is not None:
            self._buffer.write(data)
        elif len(data) >= _SMALL:
            self._parts.append(data)
            if self.size >= LARGE:
                self._buffer = BytesIO()
                self._buffer.writelines(self._parts)
                self._parts = []
        elif self._parts and isinstance(tail := self._parts[-1], bytearray):
            tail += data
        else:
            self._parts.append(bytearray(data))

    def clear(self) -> None:
        """Forget the bytes so far."""
        if self.size:
            self._parts, self._buffer, self.size = [], None, 0

    def cut(self, at: int) -> bytes:
        """Remove and return the bytes from offset `at` on. Does not copy those before it if there
        are `LARGE` bytes or more."""
        if (buffer := self._buffer) is None:
            whole = self.take()
            self.add(whole[:at])
            return whole[at:]
        buffer.seek(at)
        rest = buffer.read()
        buffer.seek(at)
        buffer.truncate()
        self.size = at
        return rest

    def take(self) -> bytes:
        """All bytes so far; nothing is left."""
        parts, buffer = self._parts, self._buffer
        self.clear()
        # The second without a copy.
        return b"".join(parts) if buffer is None else buffer.getvalue()
