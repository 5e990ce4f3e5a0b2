"""An empty shared library in place of a large one whose functions are never called.

With lazy binding the dynamic linker needs a file with the library's name at start, and looks up a
function only at its first call. A stub defines no function, so such a call ends the program with an
error that names the symbol.
"""

import struct
from pathlib import Path

# ELF64, little endian, as on both architectures that have wheels.
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<QQ")
_SYMBOL_SIZE = 24
_SHARED_OBJECT = 3
_LOAD, _DYNAMIC, _READ = 1, 2, 4
_HASH, _STRINGS, _SYMBOLS, _STRINGS_SIZE, _SYMBOL_ENTRY, _SONAME = 4, 5, 6, 10, 11, 14
_PAGE = 0x1000


def empty_library(name: str, like: Path) -> bytes:
    """A library with soname `name`, for the same processor architecture as the library `like`."""
    with like.open("rb") as opened:
        ident, _, machine, *_ = _HEADER.unpack(opened.read(_HEADER.size))
    strings = b"\0" + name.encode() + b"\0"
    # One hash bucket and one symbol: the unnamed first entry that every symbol table has.
    symbols, hashed = bytes(_SYMBOL_SIZE), struct.pack("<4I", 1, 1, 0, 0)
    at_symbols = _HEADER.size + 2 * _SEGMENT.size
    at_hash = at_symbols + len(symbols)
    at_dynamic = at_hash + len(hashed)
    entries = [
        (_SONAME, 1),
        (_HASH, at_hash),
        (_SYMBOLS, at_symbols),
        (_SYMBOL_ENTRY, _SYMBOL_SIZE),
        (_STRINGS, at_dynamic + 7 * _ENTRY.size),
        (_STRINGS_SIZE, len(strings)),
        (0, 0),
    ]
    dynamic = b"".join(_ENTRY.pack(*entry) for entry in entries)
    size = at_dynamic + len(dynamic) + len(strings)
    header = _HEADER.pack(
        *(ident, _SHARED_OBJECT, machine, 1, 0, _HEADER.size, 0, 0),
        *(_HEADER.size, _SEGMENT.size, 2, 0, 0, 0),
    )
    # The dynamic linker writes into the dynamic section, so its segment must be writable.
    writable = _READ | 2
    segments = _SEGMENT.pack(_LOAD, writable, 0, 0, 0, size, size, _PAGE) + _SEGMENT.pack(
        _DYNAMIC, writable, at_dynamic, at_dynamic, at_dynamic, len(dynamic), len(dynamic), 8
    )
    return header + segments + symbols + hashed + dynamic + strings
