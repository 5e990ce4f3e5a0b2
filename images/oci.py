"""Write OCI image layers and archives reproducibly: equal content gives equal bytes.

Files belong to root and have modification time 0. Layers are not compressed, because the machine
that writes them usually reads them. Format: https://github.com/opencontainers/image-spec
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_EPOCH = "1970-01-01T00:00:00Z"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Text:
    """A file with the given content."""

    content: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Directory:
    """An empty directory."""

    mode: int = 0o755


Content = Path | Text | Link | Directory
"""A `Path` is a file of this machine; of its mode only the execute bit is kept."""
Files = Mapping[str, Content]
"""Content by absolute path in the image."""


@dataclass(frozen=True)
class Layer:
    """A layer's tar on disk."""

    path: Path
    digest: str
    size: int


@dataclass(frozen=True)
class Image:
    """An image: layers, and how a container runs."""

    reference: str
    """Name for the container runtime: `docker.io/library/tandem:1.0`."""
    layers: Sequence[Layer]
    entrypoint: Sequence[str] = ()
    arguments: Sequence[str] = ()
    """Of the entrypoint, for containers that give none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = "65532:65532"
    working_directory: str = "/"
    labels: Mapping[str, str] = field(default_factory=dict)


def write_layer(files: Files, target: Path) -> Layer:
    """Write `files` to the tar `target`, replacing an existing one when complete."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    with partial.open("wb") as out:
        hashed = _Hashing(out)
        with tarfile.open(fileobj=hashed, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            existing: set[str] = set()
            for path, content in sorted(files.items()):
                name = path.lstrip("/")
                for parent in _parents(name, existing):
                    tar.addfile(_directory(parent, 0o755))
                _add(tar, name, content)
                existing.add(name)
        size = out.tell()
    partial.replace(target)
    return Layer(target, f"sha256:{hashed.digest.hexdigest()}", size)


def write_archive(image: Image, target: Path) -> None:
    """Write `image` as an OCI archive, for `ctr images import`, `podman load`, `skopeo copy`.

    Layers come first, in order. If `target` exists, its equal leading members are kept, so that
    after a change of the last layer only that layer is written.
    """
    config = _json(_config(image))
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _described(_CONFIG, config),
            "layers": [
                {"mediaType": _LAYER, "digest": layer.digest, "size": layer.size}
                for layer in image.layers
            ],
        }
    )
    descriptor = _described(_MANIFEST, manifest) | {
        "annotations": {
            "io.containerd.image.name": image.reference,
            "org.opencontainers.image.ref.name": image.reference.rpartition(":")[2],
        }
    }
    index = _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [descriptor]})
    members: list[tuple[str, Path | bytes]] = [
        ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
        *((_blob(layer.digest), layer.path) for layer in image.layers),
        (_blob(_digest(config)), config),
        (_blob(_digest(manifest)), manifest),
        ("index.json", index),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()
    with target.open("r+b") as out:
        _write_members(out, members)


def _write_members(out: BinaryIO, members: Sequence[tuple[str, Path | bytes]]) -> None:
    """Make `out` a tar of `members`, skipping leading blobs that it already holds (same digest)."""
    length = out.seek(0, io.SEEK_END)
    position, same = 0, True
    for name, content in members:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        header = _file(name, size, 0o644).tobuf(tarfile.GNU_FORMAT)
        end = position + len(header) + size + -size % tarfile.BLOCKSIZE
        out.seek(position)
        same = same and name.startswith("blobs/") | (position == 0)
        same = same and end <= length and out.read(len(header)) == header
        if not same:
            out.seek(position)
            out.truncate()
            out.write(header)
            _copy(content, out)
            out.write(bytes(-size % tarfile.BLOCKSIZE))
        position = end
    out.seek(position)
    out.truncate()
    out.write(bytes(2 * tarfile.BLOCKSIZE))


def _copy(content: Path | bytes, out: BinaryIO) -> None:
    if isinstance(content, bytes):
        out.write(content)
        return
    with content.open("rb") as source:
        while chunk := source.read(1 << 22):
            out.write(chunk)


def _add(tar: tarfile.TarFile, name: str, content: Content) -> None:
    match content:
        case Text(data, mode):
            tar.addfile(_file(name, len(data), mode), io.BytesIO(data))
        case Directory(mode):
            tar.addfile(_directory(name, mode))
        case Link(target):
            info = _file(name, 0, 0o777)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        case Path():
            status = content.stat()
            mode = 0o755 if status.st_mode & 0o100 else 0o644
            with content.open("rb") as opened:
                tar.addfile(_file(name, status.st_size, mode), opened)


def _parents(name: str, existing: set[str]) -> Iterator[str]:
    """Directories above `name` that are not in `existing` yet, outermost first."""
    for parent in reversed([str(p) for p in Path(name).parents if str(p) != "."]):
        if parent not in existing:
            existing.add(parent)
            yield parent


def _file(name: str, size: int, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    return info


def _directory(name: str, mode: int) -> tarfile.TarInfo:
    info = _file(name, 0, mode)
    info.type = tarfile.DIRTYPE
    return info


def _config(image: Image) -> dict[str, Any]:
    machine = platform.machine()
    return {
        "created": _EPOCH,
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": {
            "User": image.user,
            "Env": [f"{name}={value}" for name, value in image.environment.items()],
            "Entrypoint": list(image.entrypoint),
            "Cmd": list(image.arguments),
            "WorkingDir": image.working_directory,
            "Labels": dict(image.labels),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in image.layers]},
        "history": [],
    }


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _described(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


class _Hashing(io.RawIOBase):
    """Writes through to a file and computes the SHA-256 digest of the data."""

    def __init__(self, out: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._out = out

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._out.write(data)
