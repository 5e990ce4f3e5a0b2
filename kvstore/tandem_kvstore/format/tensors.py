"""Data objects: the tensors of one layer group in the safetensors format.

    8 bytes header length | JSON header | tensors, in the header's order

The header is padded with spaces so that the tensors start at a multiple of 64 bytes: readers copy
them without realignment. Its `__metadata__` repeats key, group and identity, for people and tools
that look at one object. The safetensors library is not used, because it copies every tensor.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from ..errors import UNREADABLE, KvRejected, Reason

Buffer = bytes | bytearray | memoryview

_DTYPES: Final = {
    "float64": ("F64", 8), "float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
    "fp8_e4m3": ("F8_E4M3", 1), "fp8_e5m2": ("F8_E5M2", 1), "uint8": ("U8", 1),
}  # fmt: skip
"""Name in torch → name in safetensors, and bytes of an element."""
_ALIGNMENT: Final = 64
_MAX_HEADER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, data type and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        size = _DTYPES[self.dtype][1]
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Tensors of some layers of one chunk, to be written as one object."""

    name: str
    """Unique in the chunk: `00`, `01`, …"""
    specs: tuple[TensorSpec, ...]
    parts: Sequence[Buffer]
    """The bytes of all tensors in the order of `specs`, in any number of pieces."""


def header_bytes(group: str, specs: Sequence[TensorSpec], key: str, identity: str) -> bytes:
    """The length and header that precede the tensors' bytes."""
    entries: dict[str, object] = {
        "__metadata__": {"prefix_hash": key, "group": group, "identity": identity}
    }
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype][0],
            "shape": spec.shape,
            "data_offsets": (offset, offset + spec.size),
        }
        offset += spec.size
    header = msgspec.json.encode(entries)
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def content_hash(parts: Sequence[Buffer]) -> str:
    """XXH3-128 of all parts, 32 hexadecimal digits.

    It detects damage and tells two writers' bytes apart at about the speed of memory. It does not
    protect against a client that may write to the store and replaces KV and checksum.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def tensor_views(
    data: Buffer, group: str, specs: Sequence[TensorSpec], key: str, identity: str
) -> list[memoryview]:
    """The bytes of each tensor in `data`, in the order of `specs`. The checksum of `data` must have
    been verified. Raises KvRejected if its header is not the one that this release writes.
    """
    view = memoryview(data).cast("B")
    expected = header_bytes(group, specs, key, identity)
    start = len(expected)
    # Compare bytes instead of parsing: a header that parsers could read differently is refused.
    if view[:start] != expected or len(view) != start + sum(spec.size for spec in specs):
        raise KvRejected(
            _difference(view, key, identity), f"data object {group} of {key} has another header"
        )
    views = []
    for spec in specs:
        views.append(view[start : start + spec.size])
        start += spec.size
    return views


def _difference(view: memoryview, key: str, identity: str) -> Reason:
    """The reason for which a header differs."""
    try:
        (length,) = struct.unpack_from("<Q", view)
        if length > _MAX_HEADER:
            return Reason.FORMAT
        metadata = msgspec.json.decode(view[8 : 8 + length])["__metadata__"]
        if metadata["identity"] != identity:
            return Reason.FOREIGN
        return Reason.SWAPPED if metadata["prefix_hash"] != key else Reason.FORMAT
    except (struct.error, *UNREADABLE, KeyError, TypeError):
        return Reason.FORMAT
