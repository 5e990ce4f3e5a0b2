"""Header sections: HPACK (RFC 7541) both ways, and the rules for fields (RFC 9113, 8.2 and 8.3).

*Requests.* The server announces a header table of size 0. A client that has followed it refers to
no earlier block, so that a block's bytes determine its fields, and equal blocks, from any
connection, are decoded once. Until then, and for clients that never follow although they must,
blocks are decoded with the table of 4,096 bytes that every client may use at first, and are not
cached. h2spec's client is one of those.

*Responses* are literals without indexing: this server uses no table either, and needs no encoder.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hpack import Decoder
from hpack.exceptions import HPACKError

from .errors import ConnectionFault, ErrorCode, MalformedFields

TABLE_SIZE: Final = 0
"""Bytes of header table that this server announces."""
EMPTY_TABLE: Final = b"\x20"
"""A table size update to 0. It begins the first block of a connection, so that no later SETTINGS of
the client changes the size (RFC 7541, 4.2)."""

_NAME: Final = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
"""A field name in lower case (8.2.1); only a pseudo-header field begins with a colon."""
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
"""What no field value may hold (8.2.1)."""
_CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""Fields of HTTP/1.1 connections, which are malformed here (8.2.2)."""
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path"))
_DIGITS: Final = re.compile("[0-9]{1,18}")

Fields = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request's header section."""

    method: str
    path: str
    """Empty for CONNECT."""
    fields: Mapping[str, str]
    """The others by name, as latin-1; a repeated name has its values joined by commas."""
    length: int | None = None
    """content-length; None: not given."""


class BlockCache:
    """Requests by the bytes of their blocks, shared by all connections."""

    def __init__(self, entries: int = 512, largest: int = 2048) -> None:
        """At most `entries` blocks of at most `largest` bytes each."""
        self._heads: dict[bytes, RequestHead] = {}
        self._entries, self._largest = entries, largest
        self.get = self._heads.get

    def add(self, block: bytes, head: RequestHead) -> None:
        """Keep `head`. A full cache starts again: blocks that recur are back after one miss each,
        and those that never recur cannot fill it for long."""
        if len(block) <= self._largest:
            if len(self._heads) >= self._entries:
                self._heads.clear()
            self._heads[block] = head

    def __len__(self) -> int:
        return len(self._heads)


class HeaderDecoder:
    """Decodes the blocks of one connection, in order."""

    def __init__(self, cache: BlockCache, header_list: int) -> None:
        """`header_list` bounds a decoded section, in bytes, with 32 added per field."""
        self._decoder = Decoder(max_header_list_size=header_list)
        self._cache = cache
        self._is_stateless = False
        """Whether the client has given up its table; it cannot take it back."""

    def request(self, block: bytes) -> RequestHead:
        """The request of a whole block. Raises MalformedFields, or ConnectionFault when the
        connection's compression state is lost."""
        if not self._is_stateless:
            return _request(self._decode(block))
        if (head := self._cache.get(block)) is None:
            head = _request(self._decode(block))
            self._cache.add(block, head)
        return head

    def trailers(self, block: bytes) -> None:
        """Check a trailer section: gRPC clients send none, and this server reads none. Raises as
        `request` does."""
        for name, value in self._decode(block):
            if name.startswith(b":"):
                raise MalformedFields("a pseudo-header field in trailers")
            _check(name, value)

    def skip(self, block: bytes) -> None:
        """Decode a block that does not count, for the compression state. Raises ConnectionFault."""
        self._decode(block)

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        try:
            fields = list(self._decoder.decode(block, raw=True))
        except HPACKError as err:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(err)) from err
        if not self._is_stateless and self._decoder.header_table_size == 0:
            # A table of size 0 is empty. From here on no update may make it larger.
            self._is_stateless = True
            self._decoder.max_allowed_table_size = 0
        return fields  # type: ignore[return-value]


def _request(fields: Fields) -> RequestHead:
    pseudo: dict[bytes, bytes] = {}
    others: dict[str, str] = {}
    for name, value in fields:
        _check(name, value)
        if name.startswith(b":"):
            if others or name in pseudo or name not in _PSEUDO:
                raise MalformedFields(f"the pseudo-header field {name!r} is misplaced or unknown")
            pseudo[name] = value
        else:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            others[key] = f"{others[key]},{text}" if key in others else text
    return _head(pseudo, others)


def _head(pseudo: Mapping[bytes, bytes], others: Mapping[str, str]) -> RequestHead:
    method = pseudo.get(b":method", b"")
    is_connect = method == b"CONNECT"
    needs = (b":authority",) if is_connect else (b":method", b":scheme", b":path")
    if not all(pseudo.get(name) for name in needs):
        raise MalformedFields("a pseudo-header field is missing or empty")
    if is_connect and (b":scheme" in pseudo or b":path" in pseudo):
        raise MalformedFields("CONNECT with :scheme or :path")
    length = others.get("content-length")
    if length is not None and not _DIGITS.fullmatch(length):
        raise MalformedFields("content-length is no number")
    path = pseudo.get(b":path", b"").decode("latin-1")
    return RequestHead(
        method.decode("latin-1"), path, others, None if length is None else int(length)
    )


def _check(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise MalformedFields(f"the field name {name!r} is invalid")
    if _BAD_VALUE.search(value):
        raise MalformedFields(f"the value of {name!r} is invalid")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise MalformedFields(f"the field {name!r} belongs to HTTP/1.1")


def encode(fields: Fields) -> bytes:
    """A block of literals without indexing, names and values as they are."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def _string(text: bytes) -> bytes:
    """A string literal without Huffman coding (RFC 7541, 5.2)."""
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    size -= 0x7F
    prefix = bytearray((0x7F,))
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix) + text
