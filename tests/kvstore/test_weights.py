"""The hash of a model's weights, and its cache."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem_kvstore.weights import file_version, weights_hash


def test_every_byte_counts_and_digests_are_cached(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 100_000)
    cache = tmp_path / "cache"
    first = weights_hash(files, cache)
    assert weights_hash(list(reversed(files)), cache) == first
    assert len(list(cache.iterdir())) == 2
    # A copy elsewhere has the same hash; one byte in its middle gives another.
    data = bytearray(files[1].read_bytes())
    data[50_000] ^= 1
    files[1].write_bytes(data)
    assert weights_hash(files, cache) != first


def test_a_digest_is_read_from_the_cache_while_the_file_is_the_same(tmp_path: Path) -> None:
    file, cache = tmp_path / "a.safetensors", tmp_path / "cache"
    file.write_bytes(b"weights")
    first = weights_hash([file], cache)
    (entry,) = cache.iterdir()
    entry.write_text("ab" * 32)
    cached = weights_hash([file], cache)
    assert cached != first
    assert weights_hash([file], cache) == cached
    # Written again, with the same size and content: another time, so the digest is computed again.
    os.utime(file, ns=(1, 1))
    assert weights_hash([file], cache) == first


def test_a_file_that_was_written_again_with_its_old_size_and_time_is_read_again(
    tmp_path: Path,
) -> None:
    file, cache = tmp_path / "a.safetensors", tmp_path / "cache"
    file.write_bytes(b"weights")
    os.utime(file, ns=(1, 1))
    first, changed = weights_hash([file], cache), file.stat().st_ctime_ns
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(1, 1))
    # The clock of file systems has steps of some milliseconds.
    while file.stat().st_ctime_ns == changed:
        os.utime(file, ns=(1, 1))
    assert weights_hash([file], cache) != first


@pytest.mark.parametrize("field", ["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"])
def test_each_field_of_a_files_status_is_a_part_of_its_version(field: str) -> None:
    status = dict.fromkeys(("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"), 1)
    versions = [file_version(SimpleNamespace(**status | {field: value})) for value in (1, 2)]  # type: ignore[arg-type]
    assert versions[0] != versions[1]


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"weights")
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a directory")
    assert weights_hash([file], blocked) == weights_hash([file], tmp_path / "cache")
