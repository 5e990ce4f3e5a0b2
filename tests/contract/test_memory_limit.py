"""The default of --held-bytes: from the container's limit, where there is one."""

from pathlib import Path

import pytest

from tandem_contract.memory_limit import (
    LARGEST_DEFAULT,
    container_limit,
    default_held_bytes,
    least_held_bytes,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "1073741824\n", 1 << 30),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory/memory.limit_in_bytes", "268435456\n", 1 << 28),
        ("other", "1", None),
    ],
)
def test_the_limit_of_either_version(
    tmp_path: Path, file: str, text: str, limit: int | None
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert container_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("limit", "held"),
    [("max", LARGEST_DEFAULT), (str(8 << 30), LARGEST_DEFAULT), (str(1 << 30), 256 * MIB)],
)
def test_a_quarter_of_the_container_up_to_the_largest(
    tmp_path: Path, limit: str, held: int
) -> None:
    (tmp_path / "memory.max").write_text(limit)
    assert default_held_bytes(16 * MIB, tmp_path) == held


def test_the_largest_body_always_fits(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(str(64 * MIB))
    assert default_held_bytes(16 * MIB, tmp_path) == least_held_bytes(16 * MIB)
