"""Where a message body ends (RFC 9112 §6.3), found without copying what is passed on.

A framing is fed each piece once and says how many of its bytes belong to the message. `whole` is
the offset in the piece after its last complete chunk, so that a reader may cut there.

Errors: `BadFraming`: the peer broke the protocol, its connection is of no more use.
"""

from typing import Final, Protocol

_MAX_LINE: Final = 4096


class BadFraming(ValueError):
    """A body that HTTP/1.1 does not allow."""


class Framing(Protocol):
    """One body's progress."""

    done: bool
    whole: int

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        """Bytes of `data` within the message; appends what they carry to `payload`."""

    def complete_at_eof(self) -> bool:
        """Whether the message is whole when the connection ends now."""


class Sized:
    """A body of known length, zero included."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0
        self.whole = 0

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        taken = min(self._left, len(data))
        self._left -= taken
        self.done = self._left == 0
        self.whole = taken if self.done else 0
        if payload is not None:
            payload.append(data[:taken])
        return taken

    def complete_at_eof(self) -> bool:
        return self.done


class UntilClose:
    """A body that ends with the connection; a lost end cannot be told from a real one."""

    def __init__(self) -> None:
        self.done = False
        self.whole = 0

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        self.whole = len(data)
        if payload is not None:
            payload.append(data)
        return len(data)

    def complete_at_eof(self) -> bool:
        return True


class Chunked:
    """The chunked coding, trailers included."""

    def __init__(self) -> None:
        self.done = False
        self.whole = 0
        self._skip = 0
        """Bytes of the current chunk still to come, with the line end after it."""
        self._line = b""
        self._trailers = False

    def feed(self, data: bytes, payload: list[bytes] | None) -> int:
        at, self.whole = 0, 0
        while at < len(data) and not self.done:
            if self._skip:
                at = self._pass_chunk(data, at, payload)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                self._check_line()
                return len(data)
            self._line += data[at : end + 1]
            self._check_line()
            line, self._line, at = self._line, b"", end + 1
            self._read_line(line)
        if self.done:
            self.whole = at
        return at

    def complete_at_eof(self) -> bool:
        return self.done

    def _pass_chunk(self, data: bytes, at: int, payload: list[bytes] | None) -> int:
        taken = min(self._skip, len(data) - at)
        if payload is not None:
            payload.append(data[at : at + min(taken, max(self._skip - 2, 0))])
        self._skip -= taken
        if self._skip == 0:
            self.whole = at + taken
            if data[self.whole - 1] != 0x0A:
                raise BadFraming("a chunk does not end where its size says")
        return at + taken

    def _read_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise BadFraming("a chunk line does not end in CR LF")
        if self._trailers:
            self.done = line == b"\r\n"
            return
        digits = line.split(b";", 1)[0].strip()
        if not digits or digits.strip(b"0123456789abcdefABCDEF"):
            raise BadFraming("a chunk size is not hexadecimal")
        size = int(digits, 16)
        if size == 0:
            self._trailers = True
        else:
            self._skip = size + 2

    def _check_line(self) -> None:
        if len(self._line) > _MAX_LINE:
            raise BadFraming("a chunk line is too long")


def chunk(data: bytes) -> bytes:
    """`data` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK: Final = b"0\r\n\r\n"
