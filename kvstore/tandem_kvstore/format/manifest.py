"""Manifests: the object at `{kv_namespace}/{prefix_hash}` that makes a chunk visible.

    {"checksum": "<XXH3-128 of the bytes of manifest>", "manifest": {…}}

A writer stores the data objects first and the manifest last. The manifest names each data object
by its checksum, so it describes the bytes of one writer even when two write the same chunk.

A small chunk is *inline*: its data follow the manifest in the same object, after a line feed and in
the order of `data`, so one request reads or writes it. The JSON itself contains no line feed.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import xxhash

from tandem_contract.kv_reference import TENSOR_FORMAT

from ..errors import UNREADABLE, KvRejected, Reason
from .tensors import Buffer

MAX_MANIFEST: Final = 1 << 17
"""Most bytes of a manifest without data. A look-up reads no more of the object."""
MAX_GROUPS: Final = 1024
MAX_INLINE: Final = (1 << 20) + (1 << 14)
"""Most bytes of the data of an inline chunk. More: refused conditional writes send more for
nothing. Less: more small chunks take two round trips."""
MAX_INLINE_GROUPS: Final = 64
"""Most layer groups of an inline chunk: its manifest must fit into MAX_MANIFEST."""
_KEY_LENGTH: Final = 64


_NamePart = Annotated[str, msgspec.Meta(pattern="^[^/]*$")]
"""A part of an object's name: with a slash it could name an object of another namespace."""


class DataObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data object of one layer group."""

    group: _NamePart
    size: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes, including the header."""
    content: _NamePart
    """XXH3-128 of the bytes."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chunk as one writer stored it."""

    format: str
    identity: str
    """Digest of the writer's KvIdentity."""
    prefix_hash: str
    previous: str
    """Key of the chunk before; empty for the first."""
    token_count: int
    """Tokens from the start of the prompt to this chunk's end."""
    writer: str
    """Random id of the process that wrote the chunk."""
    data: tuple[DataObject, ...]
    is_inline: bool = False
    """Whether the data follow the manifest. Then there are no data objects."""

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
    """`{prefix_hash}-{group}-{content}`. The hyphen tells it from the name of a manifest."""
    return f"{key}-{group}-{content}"


def fits_inline(sizes: Sequence[int], limit: int) -> bool:
    """Whether a chunk whose data objects have these sizes is inline; `limit`: most bytes."""
    return sum(sizes) <= min(limit, MAX_INLINE) and len(sizes) <= MAX_INLINE_GROUPS


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest's object; for an inline chunk, those before its data."""
    raw = msgspec.json.encode(manifest)
    signed = msgspec.json.encode(_Signed(_checksum(raw), msgspec.Raw(raw)))
    return signed + b"\n" if manifest.is_inline else signed


def inline_data(data: Buffer, manifest: Manifest) -> memoryview:
    """The data that follow `manifest` in its object. Raises KvRejected if they are truncated."""
    view = memoryview(data).cast("B")
    body = view[_head_size(view) + 1 :]
    if len(body) < manifest.size:
        raise KvRejected(Reason.TRUNCATED, f"the data of {manifest.prefix_hash} are truncated")
    return body[: manifest.size]


def decode_manifest(data: Buffer, key: str, identity: str, previous: str, tokens: int) -> Manifest:
    """The manifest of the chunk `key`, which follows `previous` and ends after `tokens` tokens.

    `data`: the manifest's object, or its first bytes. Raises KvRejected if the manifest is damaged,
    or if it has another format, prefix or identity.
    """
    view = memoryview(data).cast("B")
    try:
        signed = msgspec.json.decode(view[: _head_size(view)], type=_Signed)
    except UNREADABLE as err:
        raise KvRejected(Reason.CORRUPT, f"the manifest of {key} is no manifest") from err
    if signed.checksum != _checksum(bytes(signed.manifest)):
        raise KvRejected(Reason.CORRUPT, f"the manifest of {key} has a wrong checksum")
    try:
        # Check the format first: another format may have other fields.
        if (version := msgspec.json.decode(signed.manifest, type=_Version).format) != TENSOR_FORMAT:
            raise KvRejected(
                Reason.FORMAT, f"{key} has format {version!r}, this release reads {TENSOR_FORMAT}"
            )
        manifest = msgspec.json.decode(signed.manifest, type=Manifest)
    except UNREADABLE as err:
        raise KvRejected(Reason.FORMAT, f"the manifest of {key}: {err}") from err
    if manifest.identity != identity:
        raise KvRejected(Reason.FOREIGN, f"{key} was written by another model or layout")
    place = (manifest.prefix_hash, manifest.previous, manifest.token_count)
    if place != (key, previous, tokens) or len(manifest.data) > MAX_GROUPS:
        raise KvRejected(Reason.SWAPPED, f"the manifest at {key} describes another prefix")
    return manifest


def key_of(name: str) -> str | None:
    """Key of the chunk to which an object of this name belongs, equal to the name of its manifest;
    None: the object belongs to no chunk."""
    if len(name) == _KEY_LENGTH:
        return name
    return name[:_KEY_LENGTH] if name[_KEY_LENGTH : _KEY_LENGTH + 1] == "-" else None


def _head_size(view: memoryview) -> int:
    """Bytes of the manifest: up to the first line feed, else all."""
    head = bytes(view[:MAX_MANIFEST])
    end = head.find(b"\n")
    return len(head) if end < 0 else end


def _checksum(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)
