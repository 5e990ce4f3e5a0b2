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
_PSEUDO: Final = frozenset((":method", ":scheme", ":authority", ":path"))
_DIGITS: Final = re.compile("[0-9]{1,18}")


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


class Field:
    """A field that obeys the rules for names and values."""

    __slots__ = ("is_pseudo", "name", "value")

    def __init__(self, name: str, value: str, is_pseudo: bool) -> None:
        self.name, self.value, self.is_pseudo = name, value, is_pseudo


class BlockCache:
    """What was decoded of blocks that stand alone, shared by all connections: whole requests by the
    bytes of their blocks, and single fields by theirs.

    The fields serve gateways whose blocks never recur because of one field, such as `traceparent`.
    """

    def __init__(self, entries: int = 512, largest: int = 2048) -> None:
        """At most `entries` blocks and eight times as many fields, of at most `largest` bytes."""
        self._heads: dict[bytes, RequestHead] = {}
        self._fields: dict[bytes, Field] = {}
        self._entries, self._largest = entries, largest
        self.head, self.field = self._heads.get, self._fields.get

    def add_head(self, block: bytes, head: RequestHead) -> None:
        """Keep `head`. A full cache starts again: blocks that recur are back after one miss each,
        and those that never recur cannot fill it for long."""
        if len(block) <= self._largest:
            if len(self._heads) >= self._entries:
                self._heads.clear()
            self._heads[block] = head

    def add_field(self, representation: bytes, field: Field) -> None:
        """Keep `field`, in the same way."""
        if len(representation) <= self._largest:
            if len(self._fields) >= 8 * self._entries:
                self._fields.clear()
            self._fields[representation] = field

    def __len__(self) -> int:
        return len(self._heads) + len(self._fields)


class HeaderDecoder:
    """Decodes the blocks of one connection, in order."""

    def __init__(self, cache: BlockCache, header_list: int) -> None:
        """`header_list` bounds a decoded section, in bytes, with 32 added per field."""
        self._decoder = Decoder(max_header_list_size=header_list)
        self._cache = cache
        self._header_list = header_list
        self._is_stateless = False
        """Whether the client has given up its table; it cannot take it back."""

    def request(self, block: bytes) -> RequestHead:
        """The request of a whole block. Raises MalformedFields, or ConnectionFault when the
        connection's compression state is lost."""
        if not self._is_stateless:
            return _request([_checked(*field) for field in self._decode(block)])
        if (head := self._cache.head(block)) is None:
            head = _request(self._fields(block))
            self._cache.add_head(block, head)
        return head

    def trailers(self, block: bytes) -> None:
        """Check a trailer section: gRPC clients send none, and this server reads none. Raises as
        `request` does."""
        for field in self._decode(block):
            if _checked(*field).is_pseudo:
                raise MalformedFields("a pseudo-header field in trailers")

    def skip(self, block: bytes) -> None:
        """Decode a block that does not count, for the compression state. Raises ConnectionFault."""
        self._decode(block)

    def _fields(self, block: bytes) -> list[Field]:
        """The fields of a block that stands alone. Raises as `request` does."""
        representations = split(block)
        if representations is None:
            return [_checked(*field) for field in self._decode(block)]
        fields, size = [], 0
        for representation in representations:
            if (field := self._cache.field(representation)) is None:
                # One, unless the bytes are no representation, which raises.
                (pair,) = self._decode(representation)
                field = _checked(*pair)
                self._cache.add_field(representation, field)
            fields.append(field)
            size += len(field.name) + len(field.value) + 32
        if size > self._header_list:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, "the header list is too large")
        return fields

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


def _request(fields: Iterable[Field]) -> RequestHead:
    pseudo: dict[str, str] = {}
    others: dict[str, str] = {}
    for field in fields:
        name, value = field.name, field.value
        if not field.is_pseudo:
            others[name] = f"{others[name]},{value}" if name in others else value
        elif others or name in pseudo or name not in _PSEUDO:
            raise MalformedFields(f"the pseudo-header field {name!r} is misplaced or unknown")
        else:
            pseudo[name] = value
    return _head(pseudo, others)


def _head(pseudo: Mapping[str, str], others: Mapping[str, str]) -> RequestHead:
    method = pseudo.get(":method", "")
    is_connect = method == "CONNECT"
    needs = (":authority",) if is_connect else (":method", ":scheme", ":path")
    if not all(pseudo.get(name) for name in needs):
        raise MalformedFields("a pseudo-header field is missing or empty")
    if is_connect and (":scheme" in pseudo or ":path" in pseudo):
        raise MalformedFields("CONNECT with :scheme or :path")
    length = others.get("content-length")
    if length is not None and not _DIGITS.fullmatch(length):
        raise MalformedFields("content-length is no number")
    size = None if length is None else int(length)
    return RequestHead(method, pseudo.get(":path", ""), others, size)


def _checked(name: bytes, value: bytes) -> Field:
    """The field as text. Raises MalformedFields."""
    if not _NAME.fullmatch(name):
        raise MalformedFields(f"the field name {name!r} is invalid")
    if _BAD_VALUE.search(value):
        raise MalformedFields(f"the value of {name!r} is invalid")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise MalformedFields(f"the field {name!r} belongs to HTTP/1.1")
    return Field(name.decode("latin-1"), value.decode("latin-1"), name.startswith(b":"))


def split(block: bytes) -> list[bytes] | None:
    """The representations of a block's fields (RFC 7541, 6), undecoded; None: it is malformed, or
    changes the size of the table."""
    found, at, end = [], 0, len(block)
    try:
        while at < end:
            start, first = at, block[at]
            if first & 0x80:
                _, at = _integer(block, at, 0x7F)
            elif first & 0xE0 == 0x20:
                return None
            else:
                index, at = _integer(block, at, 0x3F if first & 0x40 else 0x0F)
                # A name that is no index stands before the value.
                for _ in range(1 if index else 2):
                    size, at = _integer(block, at, 0x7F)
                    at += size
            found.append(block[start:at])
    except IndexError:
        return None
    return found if at == end else None


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """An integer in the bits of `mask` and what follows them (RFC 7541, 5.1), and where it ends.
    Raises IndexError when it is cut short, or longer than any size here."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    for shift in (0, 7, 14):
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError("an integer of more than 21 bits")


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
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
