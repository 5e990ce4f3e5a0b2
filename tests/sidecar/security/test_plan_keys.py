from pathlib import Path

import pytest

from tandem_sidecar.security.plan_keys import PlanKeys


def test_keys_follow_the_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef")
    keys = PlanKeys(tmp_path)
    assert set(keys.current) == {"a"}
    (tmp_path / "b").write_bytes(b"fedcba9876543210")
    keys.reload()
    assert set(keys.current) == {"a", "b"}
    (tmp_path / "a").unlink()
    keys.reload()
    assert set(keys.current) == {"b"}


def test_a_bad_directory_leaves_the_old_keys(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef")
    keys = PlanKeys(tmp_path)
    (tmp_path / "b").write_bytes(b"short")
    keys.reload()
    assert set(keys.current) == {"a"}


def test_a_bad_directory_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        PlanKeys(tmp_path)


def test_no_directory_means_no_keys() -> None:
    keys = PlanKeys(None)
    keys.reload()
    assert keys.current == {}
