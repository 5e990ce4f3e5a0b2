"""Manifests: the object at `{kv_namespace}/{prefix_hash}` that makes a chunk visible.

    {"checksum": "<XXH3-128 of the bytes of manifest>", "manifest": {…}}

A writer stores the data objects first and the manifest last. The manifest names each data object
by its content hash, so it describes the bytes of one writer even when two write the same chunk.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from tandem_contract.kv_reference import TENSOR_FORMAT

from ..errors import KvRejected, Reason

MAX_MANIFEST: Final = 1 << 18
"""Bytes that a reader accepts: 1,000 layer groups take less than half."""
MAX_GROUPS: Final = 1024


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


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's object."""
    raw = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Signed(_checksum(raw), msgspec.Raw(raw)))


def decode_manifest(data: bytes, key: str, identity: str, previous: str, tokens: int) -> Manifest:
    """The manifest of the chunk `key`, which follows `previous` and ends after `tokens` tokens.

    Raises KvRejected when it is damaged, of another format, prefix or engine.
    """
    try:
        signed = msgspec.json.decode(data, type=_Signed)
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


def _checksum(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)
