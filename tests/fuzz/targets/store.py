"""What names and describes KV in a store: paths of `tandem store`, addresses, keys, manifests.

First byte: 0, the rest is a path; 1, an endpoint and, behind a line feed, a namespace; 2, the
content of a manifest, for which a right checksum is written; 3, the bytes of an object.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash
from aiohttp import web

from tandem_contract.kv_reference import TENSOR_FORMAT
from tandem_kvstore.errors import KvRejected, LocationError
from tandem_kvstore.format.manifest import (
    MAX_MANIFEST,
    decode_manifest,
    encode_manifest,
    inline_data,
    key_of,
)
from tandem_kvstore.location import Protocol, store_location
from tandem_kvstore.server.app import StoreServer, StoreSettings

_ROOT = Path("/nowhere/objects")
_KEY = "a" * 64
_IDENTITY = "i" * 64
_server = StoreServer(StoreSettings(_ROOT))


def check(data: bytes) -> None:
    mode, rest = data[0] % 4 if data else 0, data[1:]
    match mode:
        case 0:
            _check_path(rest.decode("utf-8", "surrogateescape"))
        case 1:
            endpoint, _, namespace = rest.decode("utf-8", "replace").partition("\n")
            _check_location(endpoint, namespace)
        case 2:
            checksum = xxhash.xxh3_128_hexdigest(rest)
            _check_manifest(b'{"checksum":"%b","manifest":%b}' % (checksum.encode(), rest))
        case _:
            _check_manifest(rest)


def _check_path(path: str) -> None:
    with suppress(web.HTTPBadRequest):
        store, name = _server._object(path)
        file = store.directory / name
        assert file.is_relative_to(_ROOT)
        assert file.relative_to(_ROOT).as_posix() == path, "two paths name one file"
        assert not any(part.startswith((".", "-")) for part in file.relative_to(_ROOT).parts)
        key = key_of(name)
        assert key is None or name.startswith(key)


def _check_location(endpoint: str, namespace: str) -> None:
    try:
        location = store_location(endpoint, namespace)
    except LocationError:
        return
    assert ".." not in location.path_of("x").split("/")
    if location.protocol is Protocol.FILE:
        assert location.directory.is_absolute()
        assert location.directory.parts[-len(namespace.split("/")) :] == tuple(namespace.split("/"))
    else:
        assert "@" not in location.host_url


def _check_manifest(data: bytes) -> None:
    try:
        manifest = decode_manifest(data, _KEY, _IDENTITY, "", 16)
    except KvRejected:
        return
    assert (manifest.prefix_hash, manifest.identity) == (_KEY, _IDENTITY)
    assert manifest.format == TENSOR_FORMAT
    assert not any("/" in manifest.name_of(item) for item in manifest.data)
    with suppress(KvRejected):
        assert len(inline_data(data, manifest)) == manifest.size
    again = encode_manifest(manifest)
    assert msgspec.json.decode(again.split(b"\n")[0])
    if len(again) < MAX_MANIFEST:
        assert decode_manifest(again, _KEY, _IDENTITY, "", 16) == manifest
