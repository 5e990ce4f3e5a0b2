"""gRPC over HTTP/2: its framing of messages, its header fields and its status. Pure.

Source: grpc.github.io/grpc/core, PROTOCOL-HTTP2. Compression is not offered: a message with the
compressed flag is answered with UNIMPLEMENTED.
"""

from collections.abc import Mapping
from typing import Final, Protocol

from tandem_contract.held_bytes import HeldBytes

from .errors import CallFault, Status
from .headers import encode
from .pieces import LARGE, Pieces

CONTENT_TYPE: Final = "application/grpc"
PREFIX: Final = 5
"""Bytes before each message: the compressed flag, and the length in 4 bytes."""

_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_PRINTABLE: Final = range(0x20, 0x7F)

RESPONSE: Final = encode(((b":status", b"200"), (b"content-type", b"application/grpc")))
"""The header block of every answer."""
_OK: Final = encode(((b"grpc-status", b"0"),))


def trailers(status: Status, message: str = "") -> bytes:
    """The block that ends an answer."""
    if status is Status.OK:
        return _OK
    return encode(_status_fields(status, message))


def trailers_only(status: Status, message: str) -> bytes:
    """The only block of an answer without messages."""
    response = ((b":status", b"200"), (b"content-type", b"application/grpc"))
    return encode((*response, *_status_fields(status, message)))


def _status_fields(status: Status, message: str) -> tuple[tuple[bytes, bytes], ...]:
    code = (b"grpc-status", str(int(status)).encode())
    return (code, (b"grpc-message", _percent_encoded(message))) if message else (code,)


def _percent_encoded(message: str) -> bytes:
    """grpc-message: printable ASCII but for `%`, all other bytes of its UTF-8 as %XX."""
    return b"".join(
        bytes((byte,)) if byte in _PRINTABLE and byte != 0x25 else b"%%%02X" % byte
        for byte in message.encode()
    )


def is_grpc(fields: Mapping[str, str]) -> bool:
    """Whether a request's content-type is that of gRPC, with or without a suffix."""
    kind = fields.get("content-type", "")
    return kind == CONTENT_TYPE or kind.startswith(("application/grpc+", "application/grpc;"))


def timeout(fields: Mapping[str, str]) -> float | None:
    """grpc-timeout in seconds; None: no deadline. Raises CallFault when it is malformed."""
    text = fields.get("grpc-timeout")
    if text is None:
        return None
    digits, unit = text[:-1], text[-1:]
    if (
        unit not in _UNITS
        or not 1 <= len(digits) <= 8
        or not (digits.isascii() and digits.isdigit())
    ):
        raise CallFault(Status.INTERNAL, f"grpc-timeout {text!r} is malformed")
    return int(digits) * _UNITS[unit]


def framed(message: bytes) -> bytes:
    """A message with its prefix."""
    return prefix(len(message)) + message


def prefix(size: int) -> bytes:
    """What precedes an uncompressed message of `size` bytes."""
    # The compressed flag, 0, is the highest byte.
    return size.to_bytes(PREFIX, "big")


class LargeMessages(Protocol):
    """Takes messages of `LARGE` bytes and more in two parts, of which the second is collected by
    itself, because to copy it out of the message would take long."""

    def head_size(self, begin: bytes) -> int:
        """Bytes of the first part of a message that begins with `begin`; 0: it is taken whole."""

    def on_large(self, head: bytes, rest: Pieces) -> None:
        """A message is complete."""


class MessageReader:
    """Splits a stream's DATA into messages."""

    __slots__ = (
        "_head",
        "_held",
        "_is_open",
        "_limit",
        "_missing",
        "_pieces",
        "_prefix",
        "_taken",
        "is_over_budget",
        "large",
    )

    def __init__(self, limit: int, held: HeldBytes | None = None) -> None:
        """`limit` is the size of the largest message in bytes. `held` counts the bytes of
        incomplete messages."""
        self._limit = limit
        self._held = held or HeldBytes()
        self._taken = 0
        """Bytes that are counted in `held`."""
        self.is_over_budget = False
        """Whether `held` had no room for a part of the message that has begun."""
        self._prefix = b""
        """The beginning of a prefix whose rest has not come."""
        self._is_open = False
        """Whether a message has begun and not ended."""
        self._pieces = Pieces()
        """Its content so far."""
        self._missing = 0
        """Bytes of it that have not come."""
        self._head = b""
        """The first part of a large message, which is not in `_pieces`; empty: there is none."""
        self.large: LargeMessages | None = None
        """Takes large messages; None: `feed` returns them too."""

    @property
    def is_within_message(self) -> bool:
        """Whether the bytes so far end in the middle of a message."""
        return self._is_open or bool(self._prefix)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, but for one that `large` has taken. Raises CallFault:
        RESOURCE_EXHAUSTED for a message that will be too large, UNIMPLEMENTED for a compressed one;
        the call is over then."""
        messages: list[bytes] = []
        at, end = 0, len(data)
        if self._is_open:
            at = self._missing
            if end < at:
                self._missing -= end
                self._collect(data)
                return messages
            # Joined only once, and without its prefix: a large message is copied once, however
            # many frames it takes.
            self._pieces.add(data[:at] if at < end else data)
            if not self._head:
                messages.append(self._pieces.take())
                self.drop()
            else:
                self._complete_large()
        if self._prefix:
            data, at = self._prefix + data[at:], 0
            self._prefix, end = b"", len(data)
        while at < end:
            start = at + PREFIX
            if start > end:
                self._prefix = data[at:]
                break
            stop = start + self._length(data, at)
            if stop > end:
                self._is_open, self._missing = True, stop - end
                begin = data[start:]
                if stop - start >= LARGE and self.large is not None:
                    size = self.large.head_size(begin)
                    self._head, begin = begin[:size], begin[size:]
                self._collect(begin)
                break
            messages.append(data[start:stop])
            at = stop
        return messages

    def drop(self) -> None:
        """Give up the message that has begun."""
        self._is_open = self.is_over_budget = False
        self._head = b""
        self._pieces.clear()
        self._held.give_back(self._taken)
        self._taken = 0

    def _complete_large(self) -> None:
        """Pass on a large message."""
        head, rest, self._pieces = self._head, self._pieces, Pieces()
        self.drop()
        if self.large is not None:
            self.large.on_large(head, rest)

    def _collect(self, data: bytes) -> None:
        """Keep a part of a message."""
        size = len(data)
        if not self._held.take(size, of=self._taken + size + self._missing):
            # The caller decides what becomes of the call; this part is bounded by a frame.
            self._held.add(size)
            self.is_over_budget = True
        self._taken += size
        self._pieces.add(data)

    def _length(self, data: bytes, at: int) -> int:
        if data[at]:
            raise CallFault(Status.UNIMPLEMENTED, "compressed messages are not supported")
        size = data[at + 1] << 24 | data[at + 2] << 16 | data[at + 3] << 8 | data[at + 4]
        if size > self._limit:
            raise CallFault(
                Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes exceeds {self._limit}"
            )
        return size
