"""Layers and archives are reproducible and follow the OCI image format."""

import hashlib
import json
import os
import tarfile
from pathlib import Path

from images.oci import Directory, Image, Layer, Link, Text, write_archive, write_layer

REFERENCE = "docker.io/library/thing:1.0"


def layer(folder: Path, name: str, content: bytes) -> Layer:
    return write_layer({f"/opt/{name}": Text(content)}, folder / f"{name}.tar")


def test_a_layer_depends_on_its_content_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("hello")
    source.chmod(0o640)
    files = {"/b/file": source, "/a": Link("b/file"), "/tmp": Directory(0o1777)}
    first = write_layer(files, tmp_path / "first.tar")
    os.utime(source, (1, 1))
    source.chmod(0o600)
    second = write_layer(dict(reversed(files.items())), tmp_path / "second.tar")
    assert first.digest == second.digest
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.digest == "sha256:" + hashlib.sha256(first.path.read_bytes()).hexdigest()
    assert first.size == first.path.stat().st_size


def test_a_layer_holds_modes_links_and_parents(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/true")
    program.chmod(0o700)
    files = {"/usr/bin/run": program, "/run": Link("usr/bin/run"), "/tmp": Directory(0o1777)}
    layer = write_layer(files, tmp_path / "layer.tar")
    with tarfile.open(layer.path) as tar:
        modes = {member.name: (member.mode, member.uid, member.mtime) for member in tar}
        assert tar.getmember("run").linkname == "usr/bin/run"
    assert modes == {
        "run": (0o777, 0, 0),
        "tmp": (0o1777, 0, 0),
        "usr": (0o755, 0, 0),
        "usr/bin": (0o755, 0, 0),
        "usr/bin/run": (0o755, 0, 0),
    }


def test_an_archive_contains_the_blobs_that_its_index_names(tmp_path: Path) -> None:
    image = Image(REFERENCE, [layer(tmp_path, "a", b"a")], entrypoint=["/opt/a"])
    write_archive(image, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        held = {m.name: opened.read() for m in tar if (opened := tar.extractfile(m))}
    for name, content in held.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]

    def blob(described: dict[str, str]) -> bytes:
        return held[f"blobs/{described['digest'].replace(':', '/')}"]

    (named,) = json.loads(held["index.json"])["manifests"]
    assert named["annotations"]["io.containerd.image.name"] == REFERENCE
    manifest = json.loads(blob(named))
    config = json.loads(blob(manifest["config"]))
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Entrypoint"] == ["/opt/a"]
    assert config["rootfs"]["diff_ids"] == [image.layers[0].digest]
    assert blob(manifest["layers"][0]) == image.layers[0].path.read_bytes()


def test_a_rewritten_archive_equals_a_new_one(tmp_path: Path) -> None:
    base, old, new = (layer(tmp_path, name, name.encode()) for name in ("base", "old", "new"))
    rewritten, fresh = tmp_path / "rewritten.tar", tmp_path / "fresh.tar"
    for layers in ([base, old], [base, new], [new], [base, old, new], [base, new]):
        write_archive(Image(REFERENCE, layers), rewritten)
    write_archive(Image(REFERENCE, [base, new]), fresh)
    assert rewritten.read_bytes() == fresh.read_bytes()


def test_a_truncated_archive_is_completed(tmp_path: Path) -> None:
    image = Image(REFERENCE, [layer(tmp_path, "a", b"a" * 5000), layer(tmp_path, "b", b"b")])
    target = tmp_path / "image.tar"
    write_archive(image, target)
    whole = target.read_bytes()
    for length in (0, 700, 2000, len(whole) - 3000):
        target.write_bytes(whole[:length])
        write_archive(image, target)
        assert target.read_bytes() == whole
