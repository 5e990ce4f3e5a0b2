"""Manifests: the object at `{kv_namespace}/{prefix_hash}` that makes a chunk visible.

    {"checksum": "<XXH3-128 of the bytes of manifest>", "manifest": {…}}

A writer stores the data objects first and the manifest last. The manifest names each data object
by its content hash, so it describes the bytes of one writer even when two write the same chunk.

The data of a small chunk follow its manifest in the same object, after a line feed and in the order
of `data`: such a chunk is read and written with one request. JSON has no line feed of its own.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from tandem_contract.kv_reference import TENSOR_FORMAT

from ..errors import KvRejected, Reason
from .tensors import Buffer

MAX_MANIFEST: Final = 1 << 17
"""Bytes of a manifest without data that a reader accepts, and that a look-up reads at most."""
MAX_GROUPS: Final = 1024
MAX_INLINE: Final = (1 << 20) + (1 << 14)
"""Bytes of all data of a chunk, up to which they follow the manifest. More: look-ups without a load
and refused conditional writes send more for nothing. Less: a small chunk takes two round trips."""
MAX_INLINE_GROUPS: Final = 64
"""Layer groups of such a chunk, so that a look-up sees the whole manifest."""


class DataObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer group's object."""

    group: str
    size: int
    """Bytes, header included."""
    content: str
    """XXH3-128 of the bytes."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One chunk of one writer."""

    format: str
    identity: str
    """Digest of the writer's KvIdentity."""
    prefix_hash: str
    previous: str
    """Key of the chunk before; empty for the first."""
    token_count: int
    """Tokens from the start of the prompt to this chunk's end."""
    writer: str
    """Random id of the process that wrote it."""
    data: tuple[DataObject, ...]
    is_inline: bool = False
    """Whether the data follow the manifest; no data objects exist then."""

    @property
    def size(self) -> int:
        """Bytes of all data objects."""
        return sum(item.size for item in self.data)

    def name_of(self, item: DataObject) -> str:
        """Name of a data object in the namespace."""
        return data_name(self.prefix_hash, item.group, item.content)


class _Signed(msgspec.Struct, forbid_unknown_fields=True):
    checksum: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct):
    format: str


def data_name(key: str, group: str, content: str) -> str:
    """`{prefix_hash}-{group}-{content}`: never the name of a manifest, which has no hyphen."""
    return f"{key}-{group}-{content}"


def fits_inline(sizes: Sequence[int], limit: int) -> bool:
    """Whether data objects of these sizes follow their manifest."""
    return sum(sizes) <= min(limit, MAX_INLINE) and len(sizes) <= MAX_INLINE_GROUPS


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's object, or what precedes the data in it."""
    raw = msgspec.json.encode(manifest)
    signed = msgspec.json.encode(_Signed(_checksum(raw), msgspec.Raw(raw)))
    return signed + b"\n" if manifest.is_inline else signed


def inline_data(data: Buffer, manifest: Manifest) -> memoryview:
    """What follows the manifest in its object `data`. Raises KvRejected when it is too short."""
    view = memoryview(data).cast("B")
    body = view[_head_size(view) + 1 :]
    if len(body) < manifest.size:
        raise KvRejected(Reason.TRUNCATED, f"the data of {manifest.prefix_hash} are truncated")
    return body[: manifest.size]


def decode_manifest(data: Buffer, key: str, identity: str, previous: str, tokens: int) -> Manifest:
    """The manifest of the chunk `key`, which follows `previous` and ends after `tokens` tokens.

    `data`: its object, or the first bytes of it. Raises KvRejected when the manifest is damaged, of
    another format, prefix or engine.
    """
    view = memoryview(data).cast("B")
    try:
        signed = msgspec.json.decode(view[: _head_size(view)], type=_Signed)
    except msgspec.MsgspecError as err:
        raise KvRejected(Reason.CORRUPT, f"the manifest of {key} is no manifest") from err
    if signed.checksum != _checksum(bytes(signed.manifest)):
        raise KvRejected(Reason.CORRUPT, f"the manifest of {key} has a wrong checksum")
    try:
        # The format first: another one may have other fields.
        if (version := msgspec.json.decode(signed.manifest, type=_Version).format) != TENSOR_FORMAT:
            raise KvRejected(
                Reason.FORMAT, f"{key} has format {version!r}, this release reads {TENSOR_FORMAT}"
            )
        manifest = msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.MsgspecError as err:
        raise KvRejected(Reason.FORMAT, f"the manifest of {key}: {err}") from err
    if manifest.identity != identity:
        raise KvRejected(Reason.FOREIGN, f"{key} was written by another model or layout")
    place = (manifest.prefix_hash, manifest.previous, manifest.token_count)
    if place != (key, previous, tokens) or len(manifest.data) > MAX_GROUPS:
        raise KvRejected(Reason.SWAPPED, f"the manifest at {key} describes another prefix")
    return manifest


def manifest_keys(names: Sequence[str]) -> set[str]:
    """Those of the names that are manifests'."""
    return {name for name in names if len(name) == 64 and "-" not in name}


def _head_size(view: memoryview) -> int:
    """Bytes before the line feed that ends the manifest, or all."""
    head = bytes(view[:MAX_MANIFEST])
    end = head.find(b"\n")
    return len(head) if end < 0 else end


def _checksum(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)
